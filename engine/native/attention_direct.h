// One tile of K and V against few rows (decoding), from the pool straight to the registers: packing would cost more than the products.
// Included by isa_*.cpp after attention_tiles.h. Every sum is the same chain as there, so a row's result is bitwise the same both ways.

constexpr int DIRECT_ROWS = 8;

// Rows [first, last), at most R of them. While a line is used, the one at its place in `next` is asked for (see Ahead).
template <class T, class Lanes, int R>
void direct_tile(const Tile<T>& tile, const Tile<T>& next, int first, int last, const uint32_t* const* q, const Seen* seen, int64_t dim, float scale, Scratch& s);

#if defined(__AVX512F__)

inline F dot_lanes(FloatLanes, F acc, uint32_t item, __m512i lanes) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(_mm512_set1_epi32(int(item))), _mm512_castsi512_ps(lanes), acc);
}
// Values of 32 dims (of two tokens, the second 0 unless `both`) as two vectors of lanes.
inline void value_lanes(FloatLanes, const float* in, int64_t, bool, __m512i* out) {
    out[0] = _mm512_loadu_si512(in);
    out[1] = _mm512_loadu_si512(in + 16);
}
// The sums' dims, in the order that value_lanes gave, in their own order.
inline void straighten(FloatLanes, float*) {}

#if defined(__AVX512BF16__)
inline F dot_lanes(PairLanes, F acc, uint32_t item, __m512i lanes) {
    return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(int(item)), (__m512bh)lanes);
}
inline void value_lanes(PairLanes, const uint16_t* in, int64_t dim, bool both, __m512i* out) {
    __m512i even = _mm512_loadu_si512(in), odd = both ? _mm512_loadu_si512(in + dim) : _mm512_setzero_si512();
    out[0] = _mm512_unpacklo_epi16(even, odd);
    out[1] = _mm512_unpackhi_epi16(even, odd);
}
inline void straighten(PairLanes, float* acc) {
    __m512i order = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    F low = _mm512_loadu_ps(acc), high = _mm512_loadu_ps(acc + 16);
    _mm512_storeu_ps(acc, _mm512_permutex2var_ps(low, order, high));
    _mm512_storeu_ps(acc + 16, _mm512_permutex2var_ps(low, _mm512_add_epi32(order, _mm512_set1_epi32(8)), high));
}
#endif

// Scores of R rows against 16 tokens.
template <class Lanes, int R> inline void direct_scores(const uint32_t* keys, const uint32_t* next, int64_t steps, const uint32_t* const* q, F (*p)[TILE_VECTORS], int vector) {
    F acc[R];
    for (int r = 0; r < R; ++r) acc[r] = Simd::zero();
    for (int64_t step = 0; step < steps; step += 16) {
        __m512i lanes[16];
        transpose_16x16(keys + step, steps, lanes);
        for (int i = 0; i < 16; ++i) {
            ask_for(next + i * steps + step);
            for (int r = 0; r < R; ++r) acc[r] = dot_lanes(Lanes(), acc[r], q[r][step + i], lanes[i]);
        }
    }
    for (int r = 0; r < R; ++r) p[r][vector] = acc[r];
}

// 32 G dims from d on, over all tokens of the tile.
template <class T, class Lanes, int R, int G> inline void direct_values(const Tile<T>& tile, const Tile<T>& next, int row, int64_t d, int64_t dim, State& state, Scratch& s) {
    F acc[R][2 * G];
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < 2 * G; ++i) acc[r][i] = Simd::mul(Simd::load(state.acc + (row + r) * dim + d + i * 16), Simd::set1(s.corrections[row + r]));
    const uint32_t* p = s.probabilities + row * TILE_TOKENS;
    for (int run = 0; run < TILE_RUNS; ++run) {
        const T *in = tile.values[run] + d, *ahead = next.values[run] + d;
        for (int token = 0; token < tile.valid(run); token += Lanes::ITEMS, in += Lanes::ITEMS * dim, ahead += Lanes::ITEMS * dim, ++p) {
            __m512i lanes[2 * G];
            for (int line = 0; line < 2 * G; ++line) ask_for(ahead + line / G * (sizeof(T) == 2 ? dim : 16) + line % G * 32);
            for (int g = 0; g < G; ++g) value_lanes(Lanes(), in + 32 * g, dim, token + 1 < tile.valid(run), lanes + 2 * g);
            for (int r = 0; r < R; ++r)
                for (int i = 0; i < 2 * G; ++i) acc[r][i] = dot_lanes(Lanes(), acc[r][i], p[r * TILE_TOKENS], lanes[i]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int i = 0; i < 2 * G; ++i) Simd::store(state.acc + (row + r) * dim + d + i * 16, acc[r][i]);
}

template <class T, class Lanes, int R>
void direct_rows(const Tile<T>& tile, const Tile<T>& next, int row, const uint32_t* const* q, const Seen* seen, int64_t dim, float scale, State& state, Scratch& s) {
    F p[R][TILE_VECTORS];
    for (int run = 0; run < TILE_RUNS; ++run) {
        for (int i = 0; i < RUN_TOKENS / 16; ++i) {
            int vector = run * RUN_TOKENS / 16 + i;
            if (tile.valid(run) > 0) direct_scores<Lanes, R>((const uint32_t*)(tile.keys[run] + i * 16 * dim), (const uint32_t*)(next.keys[run] + i * 16 * dim), dim / Lanes::ITEMS, q + row, p, vector);
            else for (int r = 0; r < R; ++r) p[r][vector] = Simd::zero();
        }
    }
    for (int r = 0; r < R; ++r) update_row<Lanes>(p[r], seen[row + r], scale, row + r, state, s);
    constexpr int G = R <= 4 ? 2 : 1;
    int64_t d = 0;
    for (; d + 32 * G <= dim; d += 32 * G) direct_values<T, Lanes, R, G>(tile, next, row, d, dim, state, s);
    for (; d < dim; d += 32) direct_values<T, Lanes, R, 1>(tile, next, row, d, dim, state, s);
}

template <class T, class Lanes, int R>
void direct_tile(const Tile<T>& tile, const Tile<T>& next, int first, int last, const uint32_t* const* q, const Seen* seen, int64_t dim, float scale, Scratch& s) {
    if (last - first == R) return direct_rows<T, Lanes, R>(tile, next, first, q, seen, dim, scale, s.range, s);
    if constexpr (R > 1) direct_tile<T, Lanes, R - 1>(tile, next, first, last, q, seen, dim, scale, s);
}

#endif
