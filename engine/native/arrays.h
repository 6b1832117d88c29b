// What the binding files share: a tensor in place, the checks of what Python passes, the kernels in use, work over rows.
//
// Arrays are used in place, never converted, never copied. Knows nothing of any one kernel.
#pragma once
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels.h"
#include "thread_pool.h"

namespace nb = nanobind;

namespace headrace {

using NdArray = nb::ndarray<nb::device::cpu>;

// A tensor in place. Taking one from Python costs 2 us, so what is used again and again is wrapped once (headrace_native.Array).
class Array {
  public:
    explicit Array(NdArray array) : array_(std::move(array)) {}
    nb::dlpack::dtype dtype() const { return array_.dtype(); }
    size_t ndim() const { return array_.ndim(); }
    size_t shape(size_t i) const { return array_.shape(i); }
    int64_t stride(size_t i) const { return array_.stride(i); }
    void* data() const { return array_.data(); }

  private:
    NdArray array_;
};

[[noreturn]] inline void refuse(const char* name, const std::string& why) { throw nb::value_error((std::string(name) + ": " + why).c_str()); }

inline void require(bool holds, const char* name, const char* why) {
    if (!holds) refuse(name, why);
}

inline bool is_dtype(const Array& a, nb::dlpack::dtype_code code, int bits) { return a.dtype().code == uint8_t(code) && a.dtype().bits == bits && a.dtype().lanes == 1; }

inline Dtype float_dtype(const Array& a, const char* name) {
    if (is_dtype(a, nb::dlpack::dtype_code::Bfloat, 16)) return BF16;
    if (is_dtype(a, nb::dlpack::dtype_code::Float, 32)) return FP32;
    throw nb::type_error((std::string(name) + ": bfloat16 or float32 expected").c_str());
}

inline int item_bytes(Dtype dtype) { return dtype == BF16 ? 2 : 4; }

// Contiguous but for the distance between rows, which may be larger.
inline void require_rows(const Array& a, const char* name) {
    int64_t expected = 1;
    for (size_t i = a.ndim(); i-- > 1; expected *= int64_t(a.shape(i)))
        if (a.shape(i) != 1 && a.stride(i) != expected) refuse(name, "not contiguous");
    if (a.shape(0) > 1 && a.stride(0) < expected) refuse(name, "not contiguous");
}

inline int64_t row_stride(const Array& a) {
    int64_t expected = 1;
    for (size_t i = 1; i < a.ndim(); ++i) expected *= int64_t(a.shape(i));
    return a.shape(0) > 1 ? a.stride(0) : expected;
}

inline void require_contiguous(const Array& a, const char* name) {
    require_rows(a, name);
    int64_t expected = 1;
    for (size_t i = 1; i < a.ndim(); ++i) expected *= int64_t(a.shape(i));
    require(a.shape(0) <= 1 || a.stride(0) == expected, name, "not contiguous");
}

// A contiguous tensor of `dtype` and the shape named; -1 is any size.
inline void require_float(const Array& a, const char* name, Dtype dtype, std::vector<int64_t> shape) {
    if (float_dtype(a, name) != dtype) throw nb::type_error((std::string(name) + ": dtype differs").c_str());
    require(a.ndim() == shape.size(), name, "wrong number of dimensions");
    for (size_t i = 0; i < shape.size(); ++i) require(shape[i] < 0 || int64_t(a.shape(i)) == shape[i], name, "wrong shape");
}

template <class T> const T* integers(const Array& a, const char* name, size_t ndim, int64_t size) {
    if (!is_dtype(a, nb::dlpack::dtype_code::Int, 8 * sizeof(T))) throw nb::type_error((std::string(name) + (sizeof(T) == 8 ? ": int64 expected" : ": int32 expected")).c_str());
    require(a.ndim() == ndim, name, "wrong number of dimensions");
    require(size < 0 || int64_t(a.shape(0)) == size, name, "wrong length");
    require_contiguous(a, name);
    return (const T*)a.data();
}

// Cuts [0, rows) into pieces of about `row_bytes` * n >= 64 KiB and calls op(first, last) for each.
template <class Op> void over_rows(int64_t rows, int64_t row_bytes, int threads, const Op& op) {
    int64_t step = threads <= 1 ? rows : std::max<int64_t>(1, 65536 / std::max<int64_t>(row_bytes, 1));
    if (rows <= step) {
        if (rows > 0) op(int64_t(0), rows);
        return;
    }
    parallel_for((rows + step - 1) / step, threads, [&](int64_t i) { op(i * step, std::min(rows, (i + 1) * step)); });
}

inline char* thread_scratch(size_t bytes) {
    thread_local std::unique_ptr<char[]> memory;
    thread_local size_t capacity = 0;
    if (bytes + 64 > capacity) {
        capacity = bytes + 64;
        memory.reset(new char[capacity]);
    }
    return (char*)((uintptr_t(memory.get()) + 63) & ~uintptr_t(63));
}

const Kernels& current_kernels();  // of the instruction set in use

void bind_linear(nb::module_& m);
void bind_roofline(nb::module_& m);

}  // namespace headrace
