// What this machine can do at most: a plain streaming read, and products whose operands stay in registers. Included by isa_*.cpp after lanes.h, bytes.h.

inline uint64_t read_all(const char* data, int64_t bytes) {
#if defined(__AVX512F__)
    __m512i sum[8] = {};
    for (int64_t i = 0; i + 512 <= bytes; i += 512)
        for (int lane = 0; lane < 8; ++lane) sum[lane] = _mm512_xor_si512(sum[lane], _mm512_loadu_si512(data + i + lane * 64));
    for (int lane = 1; lane < 8; ++lane) sum[0] = _mm512_xor_si512(sum[0], sum[lane]);
    return uint64_t(_mm512_reduce_add_epi64(sum[0]));
#else
    uint64_t sum[8] = {};
    for (int64_t i = 0; i + 64 <= bytes; i += 64)
        for (int lane = 0; lane < 8; ++lane) {
            uint64_t word;
            __builtin_memcpy(&word, data + i + lane * 8, 8);
            sum[lane] ^= word;
        }
    return sum[0] ^ sum[1] ^ sum[2] ^ sum[3] ^ sum[4] ^ sum[5] ^ sum[6] ^ sum[7];
#endif
}

inline F as_float(F value) { return value; }
inline F as_float(I value) { return Simd::to_float(value); }

template <class Lanes> int64_t multiply(int64_t repeats, float* sink) {
    constexpr int CHAINS = 12;
    uint32_t lanes[W] = {};
    typename Lanes::Sum sum[CHAINS] = {};
    uint32_t item = 0;
    for (int chain = 0; chain < CHAINS; ++chain) {
        __asm__ volatile("" : "+r"(item));  // chains that the compiler cannot know to be equal
        sum[chain] = Lanes::dot(sum[chain], item, lanes);
    }
    for (int64_t i = 0; i < repeats; ++i) {
        __asm__ volatile("" : "+r"(item));  // one broadcast for CHAINS products, none moved out of the loop
        for (int chain = 0; chain < CHAINS; ++chain) sum[chain] = Lanes::dot(sum[chain], item, lanes);
    }
    F total = Simd::zero();
    for (int chain = 0; chain < CHAINS; ++chain) total = Simd::add(total, as_float(sum[chain]));  // every chain counts, so none is left out
    Simd::store(sink, total);
    return repeats * CHAINS * W * Lanes::ITEMS;
}
