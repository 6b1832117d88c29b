// Matrix product with packed weights: out[T, N] = x[T, K] w^T + bias. Included by isa_*.cpp after simd.h, lanes.h and bytes.h.
//
// Packed weights are panels of PANEL outputs, [N / PANEL][K steps][PANEL lanes of 32 bits]: one stream. A lane holds one fp32, two bf16 or four
// bytes of neighbouring k. Every output is one chain of additions along K, whatever rows and panels share the registers.

inline F finished(const LinearArgs&, F sum, int64_t, int64_t) { return sum; }

inline F finished(const LinearArgs& a, I sum, int64_t row, int64_t column) {
    F whole = Simd::to_float(Simd::minus(sum, ByteLanes::OFFSET * a.x_sums[row]));
    return Simd::mul(Simd::mul(whole, Simd::load(a.scales + column)), Simd::set1(a.x_scales[row]));
}

template <class O> __attribute__((noinline)) void store_outputs(const LinearArgs& a, F value, int64_t row, int64_t column) {
    int64_t left = a.n - column;
    if (left <= 0) return;
    O* out = (O*)a.out + row * a.n + column;
    if (left >= W) Simd::store(out, a.bias ? Simd::add(value, Simd::load(a.bias + column)) : value);
    else store_first(out, a.bias ? Simd::add(value, load_first(a.bias + column, int(left))) : value, int(left));
}

// R rows x C vectors of outputs. `next`: what is fetched meanwhile, `lines` cache lines a step.
// Unrolled by demand: only then do all sums stay in registers.
template <class Lanes, class O, int R, int C>
void linear_tile(const LinearArgs& a, int64_t row, int64_t column, const char* next, int lines) {
    const uint32_t* x = (const uint32_t*)a.x + row * a.steps;
    const uint32_t* lanes = (const uint32_t*)a.weight + column / PANEL * a.steps * PANEL + column % PANEL;
    typename Lanes::Sum sum[R * C];
#pragma GCC unroll 32
    for (int i = 0; i < R * C; ++i) sum[i] = typename Lanes::Sum{};
    for (int64_t step = 0; step < a.steps; ++step, lanes += PANEL) {
        for (int line = 0; line < lines; ++line, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 32
        for (int i = 0; i < R * C; ++i) sum[i] = Lanes::dot(sum[i], x[i % R * a.steps + step], lanes + i / R * W);
    }
    typename Lanes::Sum settled[R * C];
#pragma GCC unroll 32
    for (int i = 0; i < R * C; ++i) settled[i] = sum[i];
    __asm__ volatile("" : : "r"(settled) : "memory");  // from here on in memory, so that no call makes the loop spill
    for (int i = 0; i < R * C; ++i) store_outputs<O>(a, finished(a, settled[i], row + i % R, column + i / R * W), row + i % R, column + i / R * W);
}

// What the tiles of a panel fetch of the next one: all of it, in equal parts, as early as four tiles can.
struct NextPanel {
    const char* next;
    int64_t step_bytes;
    int tiles, lines;

    NextPanel(const LinearArgs& a, int64_t column, int rows_per_tile) {
        int64_t all = (a.rows + rows_per_tile - 1) / rows_per_tile;
        tiles = all >= 4 ? 4 : all >= 2 ? 2 : 1;
        lines = PANEL * 4 / 64 / tiles;
        step_bytes = a.steps * lines * 64;
        next = a.weight + column / PANEL * a.steps * PANEL * 4 + a.ahead;
    }
};

template <class Lanes, class O, int R> void linear_rows(const LinearArgs& a, int64_t column, int64_t row, NextPanel& ahead) {
    for (; row + R <= a.rows; row += R) {
        bool fetch = ahead.tiles-- > 0;
        linear_tile<Lanes, O, R, Simd::LINEAR_VECTORS>(a, row, column, ahead.next, fetch ? ahead.lines : 0);
        ahead.next += ahead.step_bytes;
    }
    if constexpr (R > 1) linear_rows<Lanes, O, R - 1>(a, column, row, ahead);
}

// Panels [first, last) of all rows.
template <class Lanes, class O> void linear_panels(const LinearArgs& a, int64_t first, int64_t last) {
    constexpr int64_t COLUMNS = Simd::LINEAR_VECTORS * W;
    for (int64_t column = first * PANEL; column < last * PANEL; column += COLUMNS) {
        NextPanel ahead(a, column, Simd::LINEAR_ROWS);
        if (column % PANEL) ahead.tiles = 0;  // a panel's first columns have fetched it all
        linear_rows<Lanes, O, Simd::LINEAR_ROWS>(a, column, 0, ahead);
    }
}
