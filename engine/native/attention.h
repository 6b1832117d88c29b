// Paged attention of one tile of queries against one KV head, block by block with an online softmax in fp32.
// Included by isa_*.cpp after lanes.h.
//
// K and V are packed tile by tile (TILE_TOKENS tokens) into lanes of 32 bits, K transposed, so that one lane is one token (scores)
// or one dim (values) and every row runs the same chain of additions whatever rows share its registers. A lane holds one fp32, or
// a pair of bf16 (two dims of K, two tokens of V) where the machine multiplies pairs.

constexpr int SCORE_VECTORS = TILE_TOKENS / W;

inline int64_t padded_dim(int64_t dim) { return (dim + 15) / 16 * 16; }

// The next tile's cache lines, asked for a few at a time between other work, so that memory and arithmetic overlap.
struct Ahead {
    const char *at = nullptr, *keys_end = nullptr, *values = nullptr, *end = nullptr;

    void begin(const void* keys, int64_t plane_bytes, int64_t tile_bytes) {
        at = (const char*)keys;
        keys_end = at + tile_bytes;
        values = at + plane_bytes;
        end = values + tile_bytes;
    }
    void some() {
        for (int n = 8; n > 0 && at < end; --n, at += 64) {
            if (at == keys_end) at = values;
            __builtin_prefetch(at);
        }
    }
};

// Where a unit keeps its state; all of it in one aligned piece of memory.
struct Scratch {
    uint32_t* keys;           // [steps of D][TILE_TOKENS]
    uint32_t* values;         // [steps of TILE_TOKENS][padded D]
    uint32_t* queries;        // [rows][D], when q must be widened
    uint32_t* probabilities;  // [VALUE_ROWS.. rows][TILE_TOKENS]
    float* sums;              // [rows][W]
    float* acc;               // [rows][padded D]
    float* maxima;            // [rows]
    float* corrections;       // [rows]
    Ahead ahead;

    static size_t bytes(int64_t rows, int64_t dim) {
        return size_t(4) * (2 * TILE_TOKENS * padded_dim(dim) + rows * (2 * padded_dim(dim) + TILE_TOKENS + 16 + 2) + 32);
    }
    Scratch(char* memory, int64_t rows, int64_t dim) {
        int64_t width = padded_dim(dim);
        keys = (uint32_t*)memory;
        values = keys + TILE_TOKENS * width;
        queries = values + TILE_TOKENS * width;
        acc = (float*)(queries + rows * width);
        probabilities = (uint32_t*)(acc + rows * width);
        sums = (float*)(probabilities + rows * TILE_TOKENS);
        maxima = sums + rows * 16;
        corrections = maxima + rows;
    }
};

// ---- packing -------------------------------------------------------------------------------------------------------------------

#if defined(__AVX512F__)
// out[j][i] = in[i][j] for 16 x 16 items of 32 bits.
inline void transpose_16x16(const uint32_t* in, int64_t in_stride, uint32_t* out, int64_t out_stride) {
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
        _mm512_storeu_si512(out + i * out_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88));
        _mm512_storeu_si512(out + (i + 8) * out_stride, _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd));
    }
}
#endif

// keys[step][token] = in[token][step], in rows of `steps` items of 32 bits.
inline void transpose_keys(const uint32_t* in, int64_t steps, uint32_t* keys, [[maybe_unused]] Ahead& ahead) {
    int64_t step = 0;
#if defined(__AVX512F__)
    for (; step + 16 <= steps; step += 16)
        for (int token = 0; token < TILE_TOKENS; token += 16) {
            transpose_16x16(in + token * steps + step, steps, keys + step * TILE_TOKENS + token, TILE_TOKENS);
            ahead.some();
        }
#endif
    for (; step < steps; ++step)
        for (int token = 0; token < TILE_TOKENS; ++token) keys[step * TILE_TOKENS + token] = in[token * steps + step];
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

// Values of tokens past `valid` read as 0: a slot that nobody wrote may hold anything, NaN too.
template <class T> void pack_keys(FloatLanes, const T* in, int64_t dim, Scratch& s) {
    if (sizeof(T) == 4) return transpose_keys((const uint32_t*)in, dim, s.keys, s.ahead);
    float* wide = (float*)s.values;  // free until the values are packed
    widen(in, TILE_TOKENS * dim, wide);
    transpose_keys((const uint32_t*)wide, dim, s.keys, s.ahead);
}
template <class T> void pack_values(FloatLanes, const T* in, int64_t dim, int valid, Scratch& s) {
    int64_t width = padded_dim(dim);
    for (int token = 0; token < TILE_TOKENS; ++token) {
        float* out = (float*)s.values + token * width;
        s.ahead.some();
        if (token < valid) widen(in + token * dim, dim, out);
        for (int64_t d = token < valid ? dim : 0; d < width; ++d) out[d] = 0.f;
    }
}

#if defined(__AVX512BF16__)
inline void pack_keys(PairLanes, const uint16_t* in, int64_t dim, Scratch& s) { transpose_keys((const uint32_t*)in, dim / 2, s.keys, s.ahead); }
inline void pack_values(PairLanes, const uint16_t* in, int64_t dim, int valid, Scratch& s) {
    int64_t width = padded_dim(dim);
    for (int token = 0; token < TILE_TOKENS; token += 2) {
        const uint16_t *even = in + token * dim, *odd = even + dim;
        uint32_t* out = s.values + token / 2 * width;
        s.ahead.some();
        for (int64_t d = 0; d < dim; d += 16) {
            __mmask16 lanes = dim - d >= 16 ? 0xffff : __mmask16((1u << (dim - d)) - 1);
            __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(token < valid ? lanes : 0, even + d));
            __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(token + 1 < valid ? lanes : 0, odd + d));
            _mm512_storeu_si512(out + d, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }
}
#endif

// ---- register tiles ------------------------------------------------------------------------------------------------------------

// Softmax state of one row after one more tile: p holds the scores, then the probabilities (not yet divided by their sum).
template <class Lanes> void update_row(F* p, int visible, float scale, int row, Scratch& s) {
    s.ahead.some();
    F largest = Simd::set1(-__builtin_inff());
    for (int i = 0; i < SCORE_VECTORS; ++i) {
        p[i] = Simd::mul(p[i], Simd::set1(scale));
        if (visible < TILE_TOKENS) p[i] = Simd::keep_first(p[i], visible - i * W, -__builtin_inff());
        largest = Simd::max(largest, p[i]);
    }
    float before = s.maxima[row], top = Simd::largest(largest);
    top = top > before ? top : before;
    F sum = Simd::load(s.sums + row * 16);
    float correction = 1.f;
    if (top > before) {
        float lane[W];
        Simd::store(lane, exp2_of(Simd::set1(before - top)));
        correction = lane[0];
        sum = Simd::mul(sum, Simd::set1(correction));
        s.maxima[row] = top;
    }
    for (int i = 0; i < SCORE_VECTORS; ++i) {
        p[i] = Lanes::rounded(exp2_of(Simd::sub(p[i], Simd::set1(top))));
        sum = Simd::add(sum, p[i]);
    }
    Simd::store(s.sums + row * 16, sum);
    s.corrections[row] = correction;
    Lanes::store_probabilities(s.probabilities + row * TILE_TOKENS, p);
}

// Scores of R rows against the packed keys, then their softmax update. `visible[r]` tokens of the tile count for row r.
template <class Lanes, int R> void score_rows(const uint32_t* const* q, int64_t steps, const int* visible, float scale, int row, Scratch& s) {
    F acc[R][SCORE_VECTORS];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < SCORE_VECTORS; ++i) acc[r][i] = Simd::zero();
    for (int64_t step = 0; step < steps; ++step) {
        const uint32_t* lanes = s.keys + step * TILE_TOKENS;
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < SCORE_VECTORS; ++i) acc[r][i] = Lanes::dot(acc[r][i], q[r][step], lanes + i * W);
    }
    for (int r = 0; r < R; ++r) update_row<Lanes>(acc[r], visible[r], scale, row + r, s);
}

template <class Lanes, int R, int V> void value_tile(int row, int64_t d, int64_t width, int steps, Scratch& s) {
    F acc[R][V];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < V; ++i) acc[r][i] = Simd::mul(Simd::load(s.acc + (row + r) * width + d + i * W), Simd::set1(s.corrections[row + r]));
    const uint32_t* p = s.probabilities + row * TILE_TOKENS;
    for (int step = 0; step < steps; ++step) {
        const uint32_t* lanes = s.values + step * width + d;
        for (int r = 0; r < R; ++r)
            for (int i = 0; i < V; ++i) acc[r][i] = Lanes::dot(acc[r][i], p[r * TILE_TOKENS + step], lanes + i * W);
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < V; ++i) Simd::store(s.acc + (row + r) * width + d + i * W, acc[r][i]);
}

template <class Lanes, int R> void value_rows(int row, int64_t dim, int steps, Scratch& s) {
    constexpr int V = Simd::VALUE_VECTORS;
    int64_t width = padded_dim(dim), d = 0;
    for (; d + V * W <= width; d += V * W) value_tile<Lanes, R, V>(row, d, width, steps, s);
    for (; d < width; d += W) value_tile<Lanes, R, 1>(row, d, width, steps, s);
}

// Calls op<R>(row) over [row, rows) in steps of at most R.
template <class Lanes, int R> void score_from(int row, int rows, const uint32_t* const* q, int64_t steps, const int* visible, float scale, Scratch& s) {
    for (; row + R <= rows; row += R) score_rows<Lanes, R>(q + row, steps, visible + row, scale, row, s);
    if constexpr (R > 1) score_from<Lanes, R - 1>(row, rows, q, steps, visible, scale, s);
}
template <class Lanes, int R> void values_from(int row, int rows, int64_t dim, int steps, Scratch& s) {
    for (; row + R <= rows; row += R) value_rows<Lanes, R>(row, dim, steps, s);
    if constexpr (R > 1) values_from<Lanes, R - 1>(row, rows, dim, steps, s);
}

// ---- one unit ------------------------------------------------------------------------------------------------------------------

constexpr int MAX_ROWS = 256;

template <class T, class Lanes> void attend_tile(const T* keys, const T* values, int valid, int first, const int* visible, int rows,
                                                const uint32_t* const* q, int64_t dim, float scale, Scratch& s) {
    pack_keys(Lanes(), keys, dim, s);
    score_from<Lanes, Simd::SCORE_ROWS>(first, rows, q, dim / Lanes::ITEMS, visible, scale, s);
    pack_values(Lanes(), values, dim, valid, s);
    int steps = (valid + Lanes::ITEMS - 1) / Lanes::ITEMS;
    values_from<Lanes, Simd::VALUE_ROWS>(first, rows, dim, steps, s);
}

template <class T> void write_rows(const AttentionArgs& a, const AttentionUnit& u, int64_t group, Scratch& s) {
    int64_t dim = a.pool.head_dim, width = padded_dim(dim);
    for (int row = 0; row < u.queries * group; ++row) {
        T* out = (T*)a.out + ((u.first_row + row / group) * a.heads + u.kv_head * group + row % group) * dim;
        F inverse = Simd::set1(1.f / Simd::sum(Simd::load(s.sums + row * 16)));
        const float* acc = s.acc + row * width;
        int64_t d = 0;
        for (; d + W <= dim; d += W) Simd::store(out + d, Simd::mul(Simd::load(acc + d), inverse));
        if (d < dim) store_first(out + d, Simd::mul(load_first(acc + d, int(dim - d)), inverse), int(dim - d));
    }
}

template <class T, class Lanes> void attend(const AttentionArgs& a, const AttentionUnit& u, char* memory) {
    const Pool& pool = a.pool;
    int64_t dim = pool.head_dim, group = a.heads / pool.kv_heads;
    int rows = int(u.queries * group);
    Scratch s(memory, rows, dim);
    const uint32_t* q[MAX_ROWS];
    int visible[MAX_ROWS];
    for (int row = 0; row < rows; ++row) {
        const T* in = (const T*)a.q + (u.first_row + row / group) * a.q_stride + (u.kv_head * group + row % group) * dim;
        q[row] = (const uint32_t*)in;
        if (sizeof(T) * Lanes::ITEMS != 4) {  // bf16 computed in fp32
            widen(in, dim, (float*)s.queries + row * dim);
            q[row] = s.queries + row * dim;
        }
        s.maxima[row] = -__builtin_inff();
    }
    __builtin_memset(s.sums, 0, size_t(rows) * 16 * 4);
    __builtin_memset(s.acc, 0, size_t(rows * padded_dim(dim)) * 4);

    int64_t tokens = pool.block_tokens, context = u.first_position + u.queries;
    auto tile_at = [&](int64_t start) { return (const T*)pool.block(u.block_table[start / tokens], u.kv_head, a.layer) + start % tokens * dim; };
    for (int64_t start = 0; start < context; start += TILE_TOKENS) {
        int first = 0;  // rows before it see nothing of this tile
        for (int row = 0; row < rows; ++row) {
            int64_t seen = u.first_position + row / group + 1 - start;
            visible[row] = seen < TILE_TOKENS ? int(seen) : TILE_TOKENS;
            if (seen <= 0) first = row + 1;
        }
        const T* keys = tile_at(start);
        if (start + TILE_TOKENS < context) s.ahead.begin(tile_at(start + TILE_TOKENS), tokens * dim * int64_t(sizeof(T)), TILE_TOKENS * dim * int64_t(sizeof(T)));
        int valid = context - start < TILE_TOKENS ? int(context - start) : TILE_TOKENS;
        attend_tile<T, Lanes>(keys, keys + tokens * dim, valid, first, visible, rows, q, dim, a.scale * LOG2E, s);
    }
    write_rows<T>(a, u, group, s);
}
