// The body of every isa_*.cpp: it defines HEADRACE_ISA (the name) and is compiled with the flags of its instruction set.
#include "kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace headrace {
namespace {

#include "simd.h"
#include "lanes.h"
#include "attention.h"
#include "elementwise.h"
#include "bytes.h"
#include "linear.h"
#include "roofline.h"

#if defined(__AVX512BF16__)
using Bf16Lanes = PairLanes;
#else
using Bf16Lanes = FloatLanes;
#endif

}  // namespace

#define HEADRACE_STRING_(name) #name
#define HEADRACE_STRING(name) HEADRACE_STRING_(name)
#define HEADRACE_TABLE_(isa) isa##_kernels
#define HEADRACE_TABLE(isa) HEADRACE_TABLE_(isa)

const Kernels& HEADRACE_TABLE(HEADRACE_ISA)() {
    static constexpr Kernels kernels = {
        HEADRACE_STRING(HEADRACE_ISA),
        Scratch::bytes,
        State::bytes,
        {attend<uint16_t, Bf16Lanes>, attend<float, FloatLanes>},
        {merge_partials<uint16_t>, merge_partials<float>},
        {norm_rows<uint16_t>, norm_rows<float>},
        {silu_mul_rows<uint16_t>, silu_mul_rows<float>},
        {rope_rows<uint16_t>, rope_rows<float>},
        {quantize_rows<uint16_t>, quantize_rows<float>},
        {linear_panels<PairLanes, uint16_t>, linear_panels<PairLanes, float>, linear_panels<FloatLanes, float>, linear_panels<ByteLanes, uint16_t>,
         linear_panels<ByteLanes, float>},
        read_all,
        {multiply<PairLanes>, multiply<FloatLanes>, multiply<ByteLanes>},
    };
    return kernels;
}

}  // namespace headrace
