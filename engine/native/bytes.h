// int8: rows rotated and rounded symmetrically by their largest magnitude, and lanes of four bytes. Included by isa_*.cpp after simd.h.
//
// Rotation: x and w alike are multiplied, 64 values at a time, by an orthogonal matrix (Hadamard), which leaves their product as it is but spreads
// a channel much larger than the others over 64, so that the others keep their digits.
// Values lie in [-127, 127]. Packed weights are stored plus 128, as unsigned bytes; sums are exact in int32, so no order matters. K is at most
// 65,536 (module.cpp checks it): 255 * 127 * K fits.

struct ByteLanes {
    static constexpr int ITEMS = 4;
    using Sum = I;
#if defined(__AVX512VNNI__)
    static constexpr int32_t OFFSET = 128;  // what dot adds for each of x's values, to be taken off at the end
    static I dot(I acc, uint32_t item, const uint32_t* lanes) { return _mm512_dpbusd_epi32(acc, _mm512_loadu_si512(lanes), _mm512_set1_epi32(int(item))); }
#elif defined(__AVX512F__)
    // Signed weights; |w| times x of w's sign: two products of at most 127 * 127 do not saturate 16 bits, 255 * 127 would.
    static constexpr int32_t OFFSET = 0;
    static I dot(I acc, uint32_t item, const uint32_t* lanes) {
        I w = _mm512_xor_si512(_mm512_loadu_si512(lanes), _mm512_set1_epi8(-128)), x = _mm512_set1_epi32(int(item));
        I signed_x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
        return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(_mm512_abs_epi8(w), signed_x), _mm512_set1_epi16(1)));
    }
#elif defined(__AVX2__)
    static constexpr int32_t OFFSET = 0;
    static I dot(I acc, uint32_t item, const uint32_t* lanes) {
        I w = _mm256_xor_si256(_mm256_loadu_si256((const __m256i*)lanes), _mm256_set1_epi8(-128)), x = _mm256_set1_epi32(int(item));
        return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)), _mm256_set1_epi16(1)));
    }
#else
    static constexpr int32_t OFFSET = 128;
    static I dot(I acc, uint32_t item, const uint32_t* lanes) {
        for (int lane = 0; lane < W; ++lane)
            for (int byte = 0; byte < 32; byte += 8) acc.v[lane] += int32_t(lanes[lane] >> byte & 0xff) * int8_t(item >> byte & 0xff);
        return acc;
    }
#endif
};

constexpr int ROTATED_VECTORS = ROTATED / W;

template <int H> void rotate_lanes(F* v) {
    if constexpr (H < W) {
        float signs[W];
        for (int i = 0; i < W; ++i) signs[i] = i & H ? -1.f : 1.f;
        F sign = Simd::load(signs);
#pragma GCC unroll 8
        for (int i = 0; i < ROTATED_VECTORS; ++i) v[i] = Simd::fma(v[i], sign, Simd::swap<H>(v[i]));
        rotate_lanes<2 * H>(v);
    }
}

template <int H> void rotate_vectors(F* v) {
    if constexpr (H < ROTATED_VECTORS) {
#pragma GCC unroll 8
        for (int i = 0; i < ROTATED_VECTORS; ++i)
            if (!(i & H)) {
                F a = v[i], b = v[i + H];
                v[i] = Simd::add(a, b);
                v[i + H] = Simd::sub(a, b);
            }
        rotate_vectors<2 * H>(v);
    }
}

inline F magnitude(F v) { return Simd::max(v, Simd::sub(Simd::zero(), v)); }

// ROTATED values times the Hadamard matrix (of 1 and -1). The largest of their magnitudes.
template <class T> F rotate_block(float* out, const T* x, int64_t left, F most) {
    F v[ROTATED_VECTORS];
#pragma GCC unroll 8
    for (int i = 0; i < ROTATED_VECTORS; ++i) {
        int64_t n = left - i * W;
        v[i] = n >= W ? Simd::load(x + i * W) : n > 0 ? load_first(x + i * W, int(n)) : Simd::zero();
    }
    rotate_lanes<1>(v);
    rotate_vectors<1>(v);
#pragma GCC unroll 8
    for (int i = 0; i < ROTATED_VECTORS; ++i) {
        Simd::store(out + i * W, v[i]);
        most = Simd::max(most, magnitude(v[i]));
    }
    return most;
}

// A row that is not finite gets a scale that is not, so that it stays visible.
template <class T> void quantize_rows(const QuantizeArgs& a, int64_t first, int64_t last, float* rotated) {
    int64_t padded = (a.k + ROTATED - 1) / ROTATED * ROTATED;
    for (int64_t row = first; row < last; ++row) {
        const T* x = (const T*)a.x + row * a.k;
        int8_t* out = a.out + row * padded;
        F most = Simd::zero(), total = Simd::zero();  // total: of whole numbers, below 2^24, so exact
        for (int64_t i = 0; i < padded; i += ROTATED) most = rotate_block(rotated + i, x + i, a.k - i, most);
        float largest = Simd::largest(most);
        F inverse = Simd::set1(largest > 0.f ? 127.f / largest : 0.f);
        for (int64_t i = 0; i < padded; i += W) {
            F whole = Simd::round(Simd::mul(Simd::load(rotated + i), inverse));
            total = Simd::add(total, whole);
            Simd::store_bytes(out + i, whole);
        }
        float sum = Simd::sum(total);
        a.scales[row] = sum == sum ? largest / (127.f * ROTATION_NORM) : sum;
        if (a.sums) a.sums[row] = sum == sum ? int32_t(sum) : 0;
    }
}
