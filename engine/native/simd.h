// One vector type `Simd` for the instruction set that this file is compiled for. Included by isa_*.cpp only, inside an
// anonymous namespace and without inline functions of the standard library: nothing compiled here may be linked elsewhere.

#if defined(__AVX512F__)

struct Simd {
    using F = __m512;
    using I = __m512i;
    static constexpr int W = 16;
    static constexpr int SCORE_ROWS = 6, SCORE_VECTORS = 4, VALUE_ROWS = 6, VALUE_VECTORS = 4, LINEAR_ROWS = 6, LINEAR_VECTORS = 4;  // register tiles

    static F zero() { return _mm512_setzero_ps(); }
    static F set1(float x) { return _mm512_set1_ps(x); }
    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F min(F a, F b) { return _mm512_min_ps(a, b); }
    static float sum(F a) { return _mm512_reduce_add_ps(a); }
    static float largest(F a) { return _mm512_reduce_max_ps(a); }
    static F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F power_of_two(F n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23)); }
    template <int H> static F swap(F a) {  // lane i with lane i ^ H
        if constexpr (H == 1) return _mm512_permute_ps(a, 0xb1);
        else if constexpr (H == 2) return _mm512_permute_ps(a, 0x4e);
        else if constexpr (H == 4) return _mm512_shuffle_f32x4(a, a, 0xb1);
        else return _mm512_shuffle_f32x4(a, a, 0x4e);
    }
    static F to_float(I a) { return _mm512_cvtepi32_ps(a); }
    static I minus(I a, int32_t b) { return _mm512_sub_epi32(a, _mm512_set1_epi32(b)); }
    static void store_bytes(int8_t* p, F whole) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole))); }
    static F first_lanes(F a, int n, F rest) { return _mm512_mask_blend_ps(n <= 0 ? 0 : n >= 16 ? 0xffff : (1u << n) - 1, rest, a); }  // n of a, then rest
    static F low_halves(const uint32_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(p), 16)); }
    static F high_halves(const uint32_t* p) { return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi32(int(0xffff0000)))); }
    static F load(const uint16_t* p) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16)); }
    static void store(uint16_t* p, F x) {
        I bits = _mm512_castps_si512(x);
        I odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        I rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
        rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0));
        _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16(rounded));
    }
};

#elif defined(__AVX2__)

struct Simd {
    using F = __m256;
    using I = __m256i;
    static constexpr int W = 8;
    static constexpr int SCORE_ROWS = 2, SCORE_VECTORS = 4, VALUE_ROWS = 2, VALUE_VECTORS = 4, LINEAR_ROWS = 2, LINEAR_VECTORS = 4;

    static F zero() { return _mm256_setzero_ps(); }
    static F set1(float x) { return _mm256_set1_ps(x); }
    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F min(F a, F b) { return _mm256_min_ps(a, b); }
    static float sum(F a) {
        __m128 half = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        half = _mm_add_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
    }
    static float largest(F a) {
        __m128 half = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
        half = _mm_max_ps(half, _mm_movehl_ps(half, half));
        return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
    }
    static F round(F a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
    static F power_of_two(F n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23)); }
    template <int H> static F swap(F a) {  // lane i with lane i ^ H
        if constexpr (H == 1) return _mm256_permute_ps(a, 0xb1);
        else if constexpr (H == 2) return _mm256_permute_ps(a, 0x4e);
        else return _mm256_permute2f128_ps(a, a, 1);
    }
    static F to_float(I a) { return _mm256_cvtepi32_ps(a); }
    static I minus(I a, int32_t b) { return _mm256_sub_epi32(a, _mm256_set1_epi32(b)); }
    static void store_bytes(int8_t* p, F whole) {
        I n = _mm256_cvtps_epi32(whole);
        __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(n), _mm256_extracti128_si256(n, 1));
        _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(halves, halves));
    }
    static F first_lanes(F a, int n, F rest) {
        I lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        return _mm256_blendv_ps(rest, a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lanes)));
    }
    static F low_halves(const uint32_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256((const __m256i*)p), 16)); }
    static F high_halves(const uint32_t* p) {
        return _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256((const __m256i*)p), _mm256_set1_epi32(int(0xffff0000))));
    }
    static F load(const uint16_t* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16)); }
    static void store(uint16_t* p, F x) {
        I bits = _mm256_castps_si256(x);
        I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        I rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
        I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
        _mm_storeu_si128((__m128i*)p, _mm256_castsi256_si128(packed));
    }
};

#else

struct Simd {
    static constexpr int W = 8;
    struct F { float v[W]; };
    struct I { int32_t v[W]; };
    static constexpr int SCORE_ROWS = 1, SCORE_VECTORS = 4, VALUE_ROWS = 1, VALUE_VECTORS = 2, LINEAR_ROWS = 1, LINEAR_VECTORS = 2;

    template <class Op> static F each(Op op) {
        F r;
        for (int i = 0; i < W; ++i) r.v[i] = op(i);
        return r;
    }
    static F zero() { return set1(0.f); }
    static F set1(float x) { return each([&](int) { return x; }); }
    static F load(const float* p) { return each([&](int i) { return p[i]; }); }
    static void store(float* p, F x) { for (int i = 0; i < W; ++i) p[i] = x.v[i]; }
    static F add(F a, F b) { return each([&](int i) { return a.v[i] + b.v[i]; }); }
    static F sub(F a, F b) { return each([&](int i) { return a.v[i] - b.v[i]; }); }
    static F mul(F a, F b) { return each([&](int i) { return a.v[i] * b.v[i]; }); }
    static F div(F a, F b) { return each([&](int i) { return a.v[i] / b.v[i]; }); }
    static F fma(F a, F b, F c) { return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; }); }
    static F max(F a, F b) { return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; }); }
    static F min(F a, F b) { return each([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; }); }
    static float sum(F a) { return ((a.v[0] + a.v[4]) + (a.v[1] + a.v[5])) + ((a.v[2] + a.v[6]) + (a.v[3] + a.v[7])); }
    static float largest(F a) {
        float r = a.v[0];
        for (int i = 1; i < W; ++i) r = a.v[i] > r ? a.v[i] : r;
        return r;
    }
    static F round(F a) { return each([&](int i) { return __builtin_rintf(a.v[i]); }); }
    static F power_of_two(F n) {
        return each([&](int i) {
            uint32_t bits = uint32_t(int32_t(n.v[i]) + 127) << 23;
            float r;
            __builtin_memcpy(&r, &bits, 4);
            return r;
        });
    }
    template <int H> static F swap(F a) { return each([&](int i) { return a.v[i ^ H]; }); }  // lane i with lane i ^ H
    static F to_float(I a) { return each([&](int i) { return float(a.v[i]); }); }
    static I minus(I a, int32_t b) {
        for (int i = 0; i < W; ++i) a.v[i] -= b;
        return a;
    }
    static void store_bytes(int8_t* p, F whole) { for (int i = 0; i < W; ++i) p[i] = int8_t(int32_t(whole.v[i])); }
    static F first_lanes(F a, int n, F rest) { return each([&](int i) { return i < n ? a.v[i] : rest.v[i]; }); }
    static F from_bits(const uint32_t* bits) {
        F r;
        __builtin_memcpy(r.v, bits, sizeof r.v);
        return r;
    }
    static F low_halves(const uint32_t* p) {
        uint32_t bits[W];
        for (int i = 0; i < W; ++i) bits[i] = p[i] << 16;
        return from_bits(bits);
    }
    static F high_halves(const uint32_t* p) {
        uint32_t bits[W];
        for (int i = 0; i < W; ++i) bits[i] = p[i] & 0xffff0000;
        return from_bits(bits);
    }
    static F load(const uint16_t* p) {
        uint32_t bits[W];
        for (int i = 0; i < W; ++i) bits[i] = uint32_t(p[i]) << 16;
        return from_bits(bits);
    }
    static void store(uint16_t* p, F x) {
        for (int i = 0; i < W; ++i) {
            uint32_t bits;
            __builtin_memcpy(&bits, &x.v[i], 4);
            p[i] = x.v[i] == x.v[i] ? uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : 0x7fc0;
        }
    }
};

#endif

using F = Simd::F;
using I = Simd::I;
constexpr int W = Simd::W;

// 2^x for x <= 127; below -127 it is 0. Relative error 2e-7.
inline F exp2_of(F x) {
    x = Simd::min(Simd::max(x, Simd::set1(-127.f)), Simd::set1(127.f));
    F whole = Simd::round(x);
    F f = Simd::sub(x, whole);
    F p = Simd::set1(1.5403530e-4f);
    p = Simd::fma(p, f, Simd::set1(1.3333558e-3f));
    p = Simd::fma(p, f, Simd::set1(9.6181291e-3f));
    p = Simd::fma(p, f, Simd::set1(5.5504109e-2f));
    p = Simd::fma(p, f, Simd::set1(2.4022651e-1f));
    p = Simd::fma(p, f, Simd::set1(6.9314718e-1f));
    p = Simd::fma(p, f, Simd::set1(1.f));
    return Simd::mul(p, Simd::power_of_two(whole));
}

// The first n < W items of a row's end; the others read as 0.
template <class T> inline F load_first(const T* p, int n) {
    T lanes[W] = {};
    for (int i = 0; i < n; ++i) lanes[i] = p[i];
    return Simd::load(lanes);
}

template <class T> inline void store_first(T* p, F x, int n) {
    T lanes[W];
    Simd::store(lanes, x);
    for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

constexpr float LOG2E = 1.44269504088896341f;
