// Row-wise kernels between the matrix products: RMS norm, rotary embedding with the write to the pool, gated SiLU.
// Included by isa_*.cpp after simd.h. Every row is reduced in W lanes, in the order of its columns.

inline float sum_of_squares(const float* x, int64_t size) {
    F total = Simd::zero();
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        F v = Simd::load(x + i);
        total = Simd::fma(v, v, total);
    }
    if (i < size) {
        F v = load_first(x + i, int(size - i));
        total = Simd::fma(v, v, total);
    }
    return Simd::sum(total);
}

inline void add_to(float* residual, const float* x, int64_t size) {
    int64_t i = 0;
    for (; i + W <= size; i += W) Simd::store(residual + i, Simd::add(Simd::load(residual + i), Simd::load(x + i)));
    for (; i < size; ++i) residual[i] += x[i];
}

template <class T> void norm_rows(const NormArgs& a, int64_t first, int64_t last) {
    const T* weight = (const T*)a.weight;
    for (int64_t row = first; row < last; ++row) {
        const float* x = a.x + row * a.size;
        if (a.residual) {
            add_to(a.residual + row * a.size, x, a.size);
            x = a.residual + row * a.size;
        }
        F scale = Simd::set1(1.f / __builtin_sqrtf(sum_of_squares(x, a.size) / float(a.size) + a.eps));
        T* out = (T*)a.out + row * a.size;
        int64_t i = 0;
        for (; i + W <= a.size; i += W) Simd::store(out + i, Simd::mul(Simd::mul(Simd::load(x + i), scale), Simd::load(weight + i)));
        if (i < a.size) {
            int n = int(a.size - i);
            store_first(out + i, Simd::mul(Simd::mul(load_first(x + i, n), scale), load_first(weight + i, n)), n);
        }
    }
}

inline F silu_times(F gate, F up) {
    F denominator = Simd::add(Simd::set1(1.f), exp2_of(Simd::mul(gate, Simd::set1(-LOG2E))));
    return Simd::mul(Simd::div(gate, denominator), up);
}

template <class T> void silu_mul_rows(char* out_, const char* gate_up, int64_t size, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
        const T* gate = (const T*)gate_up + row * 2 * size;
        const T* up = gate + size;
        T* out = (T*)out_ + row * size;
        int64_t i = 0;
        for (; i + W <= size; i += W) Simd::store(out + i, silu_times(Simd::load(gate + i), Simd::load(up + i)));
        if (i < size) {
            int n = int(size - i);
            store_first(out + i, silu_times(load_first(gate + i, n), load_first(up + i, n)), n);
        }
    }
}

// out may be x itself.
template <class T> void rotate(T* out, const T* x, const float* cos, const float* sin, int half) {
    int i = 0;
    for (; i + W <= half; i += W) {
        F a = Simd::load(x + i), b = Simd::load(x + half + i), c = Simd::load(cos + i), s = Simd::load(sin + i);
        Simd::store(out + i, Simd::sub(Simd::mul(a, c), Simd::mul(b, s)));
        Simd::store(out + half + i, Simd::add(Simd::mul(b, c), Simd::mul(a, s)));
    }
    if (i < half) {
        int n = half - i;
        F a = load_first(x + i, n), b = load_first(x + half + i, n), c = load_first(cos + i, n), s = load_first(sin + i, n);
        store_first(out + i, Simd::sub(Simd::mul(a, c), Simd::mul(b, s)), n);
        store_first(out + half + i, Simd::add(Simd::mul(b, c), Simd::mul(a, s)), n);
    }
}

template <class T> void rope_rows(const RopeArgs& a, int64_t first, int64_t last) {
    int64_t dim = a.pool.head_dim, half = dim / 2, tokens = a.pool.block_tokens;
    for (int64_t row = first; row < last; ++row) {
        T* q = (T*)a.qkv + row * a.stride;
        const float *cos = a.cos + a.positions[row] * half, *sin = a.sin + a.positions[row] * half;
        for (int64_t head = 0; head < a.heads; ++head) rotate(q + head * dim, q + head * dim, cos, sin, int(half));
        int64_t slot = a.slots[row];
        if (slot < 0) continue;
        const T* k = q + a.heads * dim;
        const T* v = k + a.pool.kv_heads * dim;
        for (int64_t head = 0; head < a.pool.kv_heads; ++head) {
            T* keys = (T*)a.pool.block(slot / tokens, head, a.layer);
            rotate(keys + slot % tokens * dim, k + head * dim, cos, sin, int(half));
            __builtin_memcpy(keys + (tokens + slot % tokens) * dim, v + head * dim, size_t(dim) * sizeof(T));
        }
    }
}
