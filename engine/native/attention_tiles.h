// One tile (TILE_TOKENS tokens) of K and V against the rows of a unit: packing, scores, softmax, values. Included by isa_*.cpp after lanes.h.
//
// K and V are packed into lanes of 32 bits, K transposed, so that one lane is one token (scores) or one dim (values) and every row runs the
// same chain of additions whatever rows share its registers. A lane holds one fp32, or a pair of bf16 (two dims of K, two tokens of V) where
// the machine multiplies pairs.

constexpr int TILE_RUNS = TILE_TOKENS / RUN_TOKENS;
constexpr int TILE_VECTORS = TILE_TOKENS / W;
constexpr float NOTHING = -1e30f;  // the maximum over no tokens, and a hidden token's score; finite: differences of it are no NaN

inline int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

// What a row sees of a tile: tokens before `end`, but for those in [gap, gap_end).
struct Seen {
    int end, gap, gap_end;

    bool all() const { return end >= TILE_TOKENS && gap >= gap_end; }
    bool nothing() const { return end <= 0 || (gap <= 0 && gap_end >= end); }
};

// The softmax of some rows over some tokens: probabilities relative to the row's maximum (in powers of 2), their sum, and their sum of values.
struct State {
    float* acc;     // [rows][padded D]
    float* sums;    // [rows][16 lanes]
    float* maxima;  // [rows]

    static size_t bytes(int64_t rows, int64_t dim) { return size_t(rows * (padded_dim(dim) + 16) + (rows + 15) / 16 * 16) * 4; }
    State(char* memory, int64_t rows, int64_t dim) : acc((float*)memory), sums(acc + rows * padded_dim(dim)), maxima(sums + rows * 16) {}

    void clear(int64_t rows, int64_t dim) {
        __builtin_memset(acc, 0, size_t(rows * (padded_dim(dim) + 16)) * 4);
        for (int64_t row = 0; row < rows; ++row) maxima[row] = NOTHING;
    }
};

// Into the L2 cache: the L1 has too few lines to wait in. (Inlined by force: GCC drops calls of a function that only prefetches.)
__attribute__((always_inline)) inline void ask_for(const void* line) { __builtin_prefetch(line, 0, 2); }

// The lines of the next tile, a share of them with each row.
struct Lines {
    const char* runs[2 * TILE_RUNS];
    int64_t run_bytes, at;
    int run, share;

    template <class T> void begin(const T* const* keys, const T* const* values, int64_t bytes, int rows) {
        for (int i = 0; i < TILE_RUNS; ++i) runs[i] = (const char*)keys[i], runs[TILE_RUNS + i] = (const char*)values[i];
        run_bytes = bytes, at = 0, run = 0, share = int(2 * TILE_RUNS * bytes / 64 / rows) + 1;
    }
    __attribute__((always_inline)) void ask() {
        for (int n = share; n > 0 && run < 2 * TILE_RUNS; --n) {
            ask_for(runs[run] + at);
            at += 64;
            if (at >= run_bytes) at = 0, ++run;
        }
    }
};

// Where a unit keeps its state; all of it in one aligned piece of memory.
struct Scratch {
    uint32_t* keys;           // [steps of D][TILE_TOKENS]
    uint32_t* values;         // [steps of TILE_TOKENS][padded D]
    uint32_t* queries;        // [rows][D], when q must be widened
    uint32_t* probabilities;  // [rows][TILE_TOKENS]
    float* corrections;       // [rows]
    State range, total;
    Lines ahead;

    static size_t bytes(int64_t rows, int64_t dim) {
        return size_t(4) * (2 * TILE_TOKENS * padded_dim(dim) + rows * (padded_dim(dim) + TILE_TOKENS) + (rows + 15) / 16 * 16) + 2 * State::bytes(rows, dim);
    }
    Scratch(char* memory, int64_t rows, int64_t dim)
        : keys((uint32_t*)memory), values(keys + TILE_TOKENS * padded_dim(dim)), queries(values + TILE_TOKENS * padded_dim(dim)),
          probabilities(queries + rows * padded_dim(dim)), corrections((float*)(probabilities + rows * TILE_TOKENS)),
          range((char*)(corrections + (rows + 15) / 16 * 16), rows, dim), total((char*)range.acc + State::bytes(rows, dim), rows, dim) {}
};

// ---- packing -------------------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
// out[j][i] = in[i][j] for 16 x 16 items of 32 bits. Not inlined: among the products it would spill registers, at half the speed.
__attribute__((noinline)) inline void transpose_16x16(const uint32_t* in, int64_t in_stride, __m512i* out) {
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_loadu_si512(in + i * in_stride);
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
    for (int i = 0; i < 8; ++i) {
        out[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        out[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    }
}
#elif defined(__AVX2__)
// out[j][i] = in[i][j] for 8 x 8 items of 32 bits.
inline void transpose_8x8(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
    __m256 r[8], t[8], u[8];
    for (int i = 0; i < 8; ++i) r[i] = _mm256_loadu_ps((const float*)(in + i * in_stride));
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int half = 0; half < 2; ++half) {
            u[i + 2 * half] = _mm256_shuffle_ps(t[i + half], t[i + half + 2], 0x44);
            u[i + 2 * half + 1] = _mm256_shuffle_ps(t[i + half], t[i + half + 2], 0xee);
        }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_ps((float*)(out + i * out_stride), _mm256_permute2f128_ps(u[i], u[i + 4], 0x20));
        _mm256_storeu_ps((float*)(out + (i + 4) * out_stride), _mm256_permute2f128_ps(u[i], u[i + 4], 0x31));
    }
}
#endif

// keys[step][token] = in[token][step] of one run, in rows of `steps` items of 32 bits.
inline void transpose_keys(const uint32_t* in, int64_t steps, uint32_t* keys) {
    int64_t step = 0;
#if defined(__AVX512F__)
    for (; step + 16 <= steps; step += 16)
        for (int token = 0; token < RUN_TOKENS; token += 16) {
            __m512i lanes[16];
            transpose_16x16(in + token * steps + step, steps, lanes);
            for (int i = 0; i < 16; ++i) _mm512_storeu_si512(keys + (step + i) * TILE_TOKENS + token, lanes[i]);
        }
#elif defined(__AVX2__)
    for (; step + 8 <= steps; step += 8)
        for (int token = 0; token < RUN_TOKENS; token += 8) transpose_8x8(in + token * steps + step, steps, keys + step * TILE_TOKENS + token, TILE_TOKENS);
#endif
    for (; step < steps; ++step)
        for (int token = 0; token < RUN_TOKENS; ++token) keys[step * TILE_TOKENS + token] = in[token * steps + step];
}

inline void widen(const float* in, int64_t n, float* out) { __builtin_memcpy(out, in, size_t(n) * 4); }
inline void widen(const uint16_t* in, int64_t n, float* out) {
    int64_t i = 0;
    for (; i + W <= n; i += W) Simd::store(out + i, Simd::load(in + i));
    for (; i < n; ++i) {
        uint32_t bits = uint32_t(in[i]) << 16;
        __builtin_memcpy(out + i, &bits, 4);
    }
}

// One run's keys, to the lanes of its tokens: column `run * RUN_TOKENS` of the tile.
template <class T> void pack_keys(FloatLanes, const T* in, int64_t dim, int run, Scratch& s) {
    uint32_t* keys = s.keys + run * RUN_TOKENS;
    if (sizeof(T) == 4) return transpose_keys((const uint32_t*)in, dim, keys);
    float* wide = (float*)s.values;  // free until the values are packed
    widen(in, RUN_TOKENS * dim, wide);
    transpose_keys((const uint32_t*)wide, dim, keys);
}

// One run's values. Those of tokens past `valid` read as 0: a slot that nobody wrote may hold anything, NaN too.
template <class T> void pack_values(FloatLanes, const T* in, int64_t dim, int run, int valid, Scratch& s) {
    int64_t width = padded_dim(dim);
    for (int token = 0; token < RUN_TOKENS; ++token) {
        float* out = (float*)s.values + (run * RUN_TOKENS + token) * width;
        if (token < valid) widen(in + token * dim, dim, out);
        for (int64_t d = token < valid ? dim : 0; d < width; ++d) out[d] = 0.f;
    }
}

#if defined(__AVX512BF16__)
inline void pack_keys(PairLanes, const uint16_t* in, int64_t dim, int run, Scratch& s) {
    transpose_keys((const uint32_t*)in, dim / 2, s.keys + run * RUN_TOKENS);
}
inline void pack_values(PairLanes, const uint16_t* in, int64_t dim, int run, int valid, Scratch& s) {
    int64_t width = padded_dim(dim);
    for (int token = 0; token < RUN_TOKENS; token += 2) {
        const uint16_t *even = in + token * dim, *odd = even + dim;
        uint32_t* out = s.values + (run * RUN_TOKENS + token) / 2 * width;
        for (int64_t d = 0; d < dim; d += 16) {
            __mmask16 lanes = dim - d >= 16 ? 0xffff : __mmask16((1u << (dim - d)) - 1);
            __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(token < valid ? lanes : 0, even + d));
            __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(token + 1 < valid ? lanes : 0, odd + d));
            _mm512_storeu_si512(out + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}
#endif

// ---- softmax -------------------------------------------------------------------------------------------------------------------

// 2^x for x <= 0, as exactly as the lanes keep it.
inline F power(FloatLanes, F x) {
    x = Simd::max(x, Simd::set1(-127.f));
    F whole = Simd::round(x), f = Simd::sub(x, whole), p = Simd::set1(1.3276471e-3f);
    constexpr float coefficients[] = {9.6755419e-3f, 5.5507131e-2f, 2.4022120e-1f, 6.9314694e-1f, 1.0000001f};
    for (float c : coefficients) p = Simd::fma(p, f, Simd::set1(c));
    return Simd::mul(p, Simd::power_of_two(whole));
}
#if defined(__AVX512BF16__)
inline F power(PairLanes, F x) {
    F whole = Simd::round(x), f = Simd::sub(x, whole), p = Simd::set1(5.5171665e-2f);
    constexpr float coefficients[] = {2.4261114e-1f, 6.9326097e-1f, 9.9992806e-1f};
    for (float c : coefficients) p = Simd::fma(p, f, Simd::set1(c));
    return _mm512_scalef_ps(p, whole);
}
#endif

inline void hide(F* p, const Seen& seen) {
    F nothing = Simd::set1(NOTHING);
    for (int i = 0; i < TILE_VECTORS; ++i) {
        if (seen.gap < seen.gap_end) p[i] = Simd::first_lanes(p[i], seen.gap - i * W, Simd::first_lanes(nothing, seen.gap_end - i * W, p[i]));
        p[i] = Simd::first_lanes(p[i], seen.end - i * W, nothing);
    }
}

// One row's state after one more tile, of which it sees something: p holds its scores, unscaled.
template <class Lanes> inline void update_row(F* p, const Seen& seen, float scale, int row, State& state, Scratch& s) {
    if (!seen.all()) hide(p, seen);
    F largest = p[0];
    for (int i = 1; i < TILE_VECTORS; ++i) largest = Simd::max(largest, p[i]);
    float before = state.maxima[row], top = Simd::largest(largest) * scale, correction = 1.f;
    top = top > before ? top : before;
    F sum = Simd::load(state.sums + row * 16), minus_top = Simd::set1(-top);
    if (top > before) {
        float lane[W];
        Simd::store(lane, power(FloatLanes(), Simd::set1(before - top)));
        correction = lane[0];
        sum = Simd::mul(sum, Simd::set1(correction));
        state.maxima[row] = top;
    }
    for (int i = 0; i < TILE_VECTORS; ++i) {
        p[i] = power(Lanes(), Simd::fma(p[i], Simd::set1(scale), minus_top));
        sum = Simd::add(sum, p[i]);
    }
    Simd::store(state.sums + row * 16, sum);
    s.corrections[row] = correction;
    Lanes::store_probabilities(s.probabilities + row * TILE_TOKENS, p);
}

// ---- register tiles ------------------------------------------------------------------------------------------------------------

// Scores of R rows against the packed keys, then their softmax.
template <class Lanes, int R>
void score_rows(const uint32_t* const* q, int64_t steps, const Seen* seen, float scale, int row, State& state, Scratch& s) {
    constexpr int V = Simd::SCORE_VECTORS;
    F p[R][TILE_VECTORS];
    for (int column = 0; column < TILE_VECTORS; column += V) {
        F acc[R][V];
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < V; ++i) acc[r][i] = Simd::zero();
        for (int64_t step = 0; step < steps; ++step) {
            const uint32_t* lanes = s.keys + step * TILE_TOKENS + column * W;
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < V; ++i) acc[r][i] = Lanes::dot(acc[r][i], q[r][step], lanes + i * W);
        }
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < V; ++i) p[r][column + i] = acc[r][i];
    }
    for (int r = 0; r < R; ++r) {
        s.ahead.ask();
        update_row<Lanes>(p[r], seen[r], scale, row + r, state, s);
    }
}

template <class Lanes, int R, int V> void value_tile(int row, int64_t d, int64_t width, int steps, State& state, Scratch& s) {
    F acc[R][V];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < V; ++i) acc[r][i] = Simd::mul(Simd::load(state.acc + (row + r) * width + d + i * W), Simd::set1(s.corrections[row + r]));
    const uint32_t* p = s.probabilities + row * TILE_TOKENS;
    for (int step = 0; step < steps; ++step) {
        const uint32_t* lanes = s.values + step * width + d;
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < V; ++i) acc[r][i] = Lanes::dot(acc[r][i], p[r * TILE_TOKENS + step], lanes + i * W);
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < V; ++i) Simd::store(state.acc + (row + r) * width + d + i * W, acc[r][i]);
}

template <class Lanes, int R> void value_rows(int row, int64_t width, int tokens, const Seen* seen, State& state, Scratch& s) {
    constexpr int V = Simd::VALUE_VECTORS;
    int most = seen[row + R - 1].end < tokens ? seen[row + R - 1].end : tokens;  // the last row sees most
    int steps = (most + Lanes::ITEMS - 1) / Lanes::ITEMS;
    int64_t d = 0;
    for (; d + V * W <= width; d += V * W) value_tile<Lanes, R, V>(row, d, width, steps, state, s);
    for (; d < width; d += W) value_tile<Lanes, R, 1>(row, d, width, steps, state, s);
}

// Rows [row, rows) in steps of at most R.
template <class Lanes, int R>
void score_from(int row, int rows, const uint32_t* const* q, int64_t steps, const Seen* seen, float scale, State& state, Scratch& s) {
    for (; row + R <= rows; row += R) score_rows<Lanes, R>(q + row, steps, seen + row, scale, row, state, s);
    if constexpr (R > 1) score_from<Lanes, R - 1>(row, rows, q, steps, seen, scale, state, s);
}
template <class Lanes, int R> void values_from(int row, int rows, int64_t width, int tokens, const Seen* seen, State& state, Scratch& s) {
    for (; row + R <= rows; row += R) value_rows<Lanes, R>(row, width, tokens, seen, state, s);
    if constexpr (R > 1) values_from<Lanes, R - 1>(row, rows, width, tokens, seen, state, s);
}
