// The machine's own limits, for the benchmarks: how fast it reads memory, how fast it multiplies in registers.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <atomic>
#include <cstdint>

#include "arrays.h"

namespace headrace {
namespace {

constexpr int64_t READ_UNIT = 1 << 18;  // bytes

int64_t bytes_of(const Array& a) {
    int64_t bytes = a.dtype().bits / 8;
    for (size_t i = 0; i < a.ndim(); ++i) bytes *= int64_t(a.shape(i));
    return bytes;
}

uint64_t read_memory(const std::vector<const Array*>& arrays, int num_threads) {
    struct Piece { const char* data; int64_t bytes; };
    std::vector<Piece> pieces;
    for (const Array* a : arrays)
        for (int64_t at = 0, end = bytes_of(*a); at < end; at += READ_UNIT) pieces.push_back({(const char*)a->data() + at, std::min(READ_UNIT, end - at)});
    auto read = current_kernels().read;
    std::atomic<uint64_t> sum{0};
    nb::gil_scoped_release released;
    parallel_for(int64_t(pieces.size()), num_threads, [&](int64_t i) { sum ^= read(pieces[i].data, pieces[i].bytes); });
    return sum;
}

int64_t multiply(const std::string& kind, int64_t repeats, int num_threads) {
    Peak peak = kind == "bf16" ? PEAK_BF16 : kind == "fp32" ? PEAK_FP32 : kind == "int8" ? PEAK_INT8 : PEAKS;
    require(peak != PEAKS, "kind", "one of bf16, fp32, int8");
    auto kernel = current_kernels().multiply[peak];
    std::atomic<int64_t> done{0};
    nb::gil_scoped_release released;
    parallel_for(num_threads, num_threads, [&](int64_t) {
        alignas(64) float sink[16];
        done += kernel(repeats, sink);
    });
    return done;
}

}  // namespace

void bind_roofline(nb::module_& m) {
    m.def("read_memory", read_memory, nb::arg("arrays"), nb::arg("num_threads") = 1, "Reads every byte once; a checksum that keeps the reads alive.");
    m.def("multiply", multiply, nb::arg("kind"), nb::arg("repeats"), nb::arg("num_threads") = 1, "Multiplications done, in chains that never leave the registers.");
}

}  // namespace headrace
