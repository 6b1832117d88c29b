// Matrix product with packed weights: out[T, N] = x[T, K] w^T + bias. Included by isa_*.cpp after simd.h, lanes.h and bytes.h.
//
// Packed weights are panels of PANEL outputs, [N / PANEL][K steps][PANEL lanes of 32 bits]: one stream. A lane holds one fp32, two bf16 or four
// bytes of neighbouring k. Every output is one chain of additions along K, whatever rows and panels share the registers.

inline F finished(const LinearArgs&, F sum, int64_t, int64_t) { return sum; }

inline F finished(const LinearArgs& a, I sum, int64_t row, int64_t column) {
    F whole = Simd::to_float(Simd::minus(sum, ByteLanes::OFFSET * a.x_sums[row]));
    return Simd::mul(Simd::mul(whole, Simd::load(a.scales + column)), Simd::set1(a.x_scales[row]));
}

template <class O> __attribute__((noinline)) void store_last(const LinearArgs& a, const F& value, O* out, int64_t column) {
    int left = int(a.n - column);
    if (left > 0) store_first(out, a.bias ? Simd::add(value, load_first(a.bias + column, left)) : value, left);
}

template <class O, int R, int C, class Sum> inline void store_tile(const LinearArgs& a, const Sum* sums, int64_t row, int64_t first) {
    for (int r = 0; r < R; ++r) {
        O* out = (O*)a.out + (row + r) * a.n;
        for (int c = 0; c < C; ++c) {
            int64_t column = first + c * W;
            F value = finished(a, sums[c * R + r], row + r, column);
            if (column + W > a.n) store_last(a, value, out + column, column);
            else Simd::store(out + column, a.bias ? Simd::add(value, Simd::load(a.bias + column)) : value);
        }
    }
}

// R rows x C vectors of outputs, unrolled by demand: only then do all sums stay in registers. Nothing is fetched ahead by hand: for one stream the
// hardware's own prefetching reads as fast as memory gives, and any of ours was slower.
template <class Lanes, class O, int R, int C>
void linear_tile(const LinearArgs& a, int64_t row, int64_t column) {
    const uint32_t* x = (const uint32_t*)a.x + row * a.steps;
    const uint32_t* lanes = (const uint32_t*)a.weight + column / PANEL * a.steps * PANEL + column % PANEL;
    typename Lanes::Sum sum[R * C];
#pragma GCC unroll 32
    for (int i = 0; i < R * C; ++i) sum[i] = typename Lanes::Sum{};
    for (int64_t step = 0; step < a.steps; ++step, lanes += PANEL)
#pragma GCC unroll 32
        for (int i = 0; i < R * C; ++i) sum[i] = Lanes::dot(sum[i], x[i % R * a.steps + step], lanes + i / R * W);
    typename Lanes::Sum settled[R * C];
#pragma GCC unroll 32
    for (int i = 0; i < R * C; ++i) settled[i] = sum[i];
    __asm__ volatile("" : : "r"(settled) : "memory");  // from here on in memory, so that no call makes the loop spill
    store_tile<O, R, C>(a, settled, row, column);
}

template <class Lanes, class O, int R> void linear_rows(const LinearArgs& a, int64_t column, int64_t row) {
    for (; row + R <= a.rows; row += R) linear_tile<Lanes, O, R, Simd::LINEAR_VECTORS>(a, row, column);
    if constexpr (R > 1) linear_rows<Lanes, O, R - 1>(a, column, row);
}

// Panels [first, last) of all rows.
template <class Lanes, class O> void linear_panels(const LinearArgs& a, int64_t first, int64_t last) {
    for (int64_t column = first * PANEL; column < last * PANEL; column += Simd::LINEAR_VECTORS * W) linear_rows<Lanes, O, Simd::LINEAR_ROWS>(a, column, 0);
}
