// Matrix product with packed weights: out[T, N] = x[T, K] w^T + bias. Included by isa_*.cpp after simd.h and lanes.h.
//
// Packed weights are panels of 16 outputs, [N / 16][K steps][16 lanes of 32 bits]; a lane holds one fp32, or two bf16 of neighbouring k.
// Every output is one chain of additions along K in fp32, whatever rows and panels share the registers.

constexpr int PANEL_VECTORS = PANEL / W;

inline F output_of(F acc, const float* bias, int n) { return bias ? Simd::add(acc, n >= W ? Simd::load(bias) : load_first(bias, n)) : acc; }

// R rows x V panels. `columns`: outputs left from this tile's first; those past it are padding.
template <class Lanes, class O, int R, int V>
void linear_tile(const uint32_t* x, int64_t steps, const uint32_t* panels, const float* bias, O* out, int64_t n, int64_t columns) {
    constexpr int C = V * PANEL_VECTORS;
    F acc[R][C];
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) acc[r][c] = Simd::zero();
    for (int64_t step = 0; step < steps; ++step)
        for (int c = 0; c < C; ++c) {
            const uint32_t* lanes = panels + (c / PANEL_VECTORS * steps + step) * PANEL + c % PANEL_VECTORS * W;
            for (int r = 0; r < R; ++r) acc[r][c] = Lanes::dot(acc[r][c], x[r * steps + step], lanes);
        }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) {
            int64_t left = columns - c * W;
            if (left <= 0) break;
            F value = output_of(acc[r][c], bias ? bias + c * W : nullptr, int(left < W ? left : W));
            if (left >= W) Simd::store(out + r * n + c * W, value);
            else store_first(out + r * n + c * W, value, int(left));
        }
}

template <class Lanes, class O, int R, int V> void linear_rows(const LinearArgs& a, int64_t panel, int64_t row) {
    int64_t steps = a.k / Lanes::ITEMS;
    const uint32_t* panels = (const uint32_t*)a.weight + panel * steps * PANEL;
    const float* bias = a.bias ? a.bias + panel * PANEL : nullptr;
    for (; row + R <= a.rows; row += R)
        linear_tile<Lanes, O, R, V>((const uint32_t*)a.x + row * steps, steps, panels, bias, (O*)a.out + row * a.n + panel * PANEL, a.n, a.n - panel * PANEL);
    if constexpr (R > 1) linear_rows<Lanes, O, R - 1, V>(a, panel, row);
}

// Panels [first, last) of all rows.
template <class Lanes, class O> void linear_panels(const LinearArgs& a, int64_t first, int64_t last) {
    constexpr int V = Simd::LINEAR_PANELS;
    int64_t panel = first;
    for (; panel + V <= last; panel += V) linear_rows<Lanes, O, Simd::LINEAR_ROWS, V>(a, panel, 0);
    for (; panel < last; ++panel) linear_rows<Lanes, O, Simd::LINEAR_ROWS, 1>(a, panel, 0);
}
