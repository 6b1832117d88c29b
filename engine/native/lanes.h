// What a lane of 32 bits holds in the inner products: one fp32, or a pair of bf16. Included by isa_*.cpp after simd.h.

struct FloatLanes {
    using Sum = F;
    static constexpr int ITEMS = 1;
    static F dot(F acc, uint32_t item, const uint32_t* lanes) {
        float x;
        __builtin_memcpy(&x, &item, 4);
        return Simd::fma(Simd::set1(x), Simd::load((const float*)lanes), acc);
    }
    static void store_probabilities(uint32_t* out, const F* p) {
        for (int i = 0; i < TILE_TOKENS / W; ++i) Simd::store((float*)out + i * W, p[i]);
    }
};

#if defined(__AVX512BF16__)
struct PairLanes {
    using Sum = F;
    static constexpr int ITEMS = 2;
    static F dot(F acc, uint32_t item, const uint32_t* lanes) {
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(int(item)), (__m512bh)_mm512_loadu_si512(lanes));
    }
    static void store_probabilities(uint32_t* out, const F* p) {
        for (int i = 0; i < TILE_TOKENS / W; i += 2) _mm512_storeu_si512(out + i / 2 * W, (__m512i)_mm512_cvtne2ps_pbh(p[i + 1], p[i]));
    }
};
#else
// The product of pairs on a machine that has none: the lower k first.
struct PairLanes {
    using Sum = F;
    static constexpr int ITEMS = 2;
    static F dot(F acc, uint32_t item, const uint32_t* lanes) {
        uint32_t low = item << 16, high = item & 0xffff0000;
        float x0, x1;
        __builtin_memcpy(&x0, &low, 4);
        __builtin_memcpy(&x1, &high, 4);
        acc = Simd::fma(Simd::set1(x0), Simd::low_halves(lanes), acc);
        return Simd::fma(Simd::set1(x1), Simd::high_halves(lanes), acc);
    }
};
#endif
