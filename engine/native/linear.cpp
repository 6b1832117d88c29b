// Matrix products for Python: packing, rounding to int8, and the products themselves, cut into panels for the threads.
#include <cstdint>

#include "arrays.h"

namespace headrace {
namespace {

constexpr int64_t BYTES_WORTH_A_THREAD = 1 << 20;  // of weights: what one thread reads while another wakes; 8 rows count as one, they take as long
constexpr int64_t MAX_INT8_COLUMNS = 65536;  // see bytes.h

bool is_bytes(const Array& a) { return is_dtype(a, nb::dlpack::dtype_code::Int, 8); }

void require_bytes(const Array& a, const char* name, std::vector<int64_t> shape) {
    if (!is_bytes(a)) throw nb::type_error((std::string(name) + ": int8 expected").c_str());
    require(a.ndim() == shape.size(), name, "wrong number of dimensions");
    for (size_t i = 0; i < shape.size(); ++i) require(shape[i] < 0 || int64_t(a.shape(i)) == shape[i], name, "wrong shape");
    require_contiguous(a, name);
}

int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

int64_t rotated_columns(int64_t k) { return (k + ROTATED - 1) / ROTATED * ROTATED; }

int items_per_lane(const Array& a) { return is_bytes(a) ? 4 : 4 / item_bytes(float_dtype(a, "weight")); }

void require_packed(const Array& packed, const char* name, int64_t n, int64_t k, int items) {
    int64_t steps = (k + items - 1) / items;
    require(packed.ndim() == 3 && int64_t(packed.shape(0)) == panels_of(n) && int64_t(packed.shape(1)) == steps && int64_t(packed.shape(2)) == PANEL * items, name,
            "wrong shape");
    require_contiguous(packed, name);
}

// weight [N, K]: fp32, bf16 (K even) or int8 (K a multiple of 4). What pads the last panel is never read into an output.
void pack_linear(const Array& packed, const Array& weight) {
    int items = items_per_lane(weight);
    require(weight.ndim() == 2, "weight", "wrong number of dimensions");
    require_contiguous(weight, "weight");
    require(is_bytes(packed) == is_bytes(weight) && packed.dtype().bits == weight.dtype().bits, "packed", "dtype differs");
    int64_t n = int64_t(weight.shape(0)), k = int64_t(weight.shape(1));
    require(k % items == 0, "weight", "an odd number of columns");
    require_packed(packed, "packed", n, k, items);

    nb::gil_scoped_release released;
    const uint32_t* in = (const uint32_t*)weight.data();
    uint32_t* out = (uint32_t*)packed.data();
    uint32_t offset = is_bytes(weight) ? 0x80808080u : 0;  // signed bytes plus 128
    int64_t steps = k / items;
    for (int64_t panel = 0; panel < panels_of(n); ++panel)
        for (int64_t step = 0; step < steps; ++step)
            for (int64_t row = panel * PANEL; row < (panel + 1) * PANEL; ++row) *out++ = row < n ? in[row * steps + step] ^ offset : 0;
}

void run_quantize(const QuantizeArgs& args, Dtype dtype, int64_t rows, int num_threads) {
    auto kernel = current_kernels().quantize[dtype];
    over_rows(rows, args.k * item_bytes(dtype), num_threads, [&](int64_t first, int64_t last) {
        kernel(args, first, last, (float*)thread_scratch(size_t(rotated_columns(args.k)) * sizeof(float)));
    });
}

void quantize_rows(const Array& out, const Array& scales, const Array& x, int num_threads) {
    Dtype dtype = float_dtype(x, "x");
    require_float(x, "x", dtype, {-1, -1});
    require_contiguous(x, "x");
    int64_t rows = int64_t(x.shape(0)), k = int64_t(x.shape(1));
    require(k <= MAX_INT8_COLUMNS, "x", "too many columns");
    require_bytes(out, "out", {rows, rotated_columns(k)});
    require_float(scales, "scales", FP32, {rows});
    require_contiguous(scales, "scales");
    nb::gil_scoped_release released;
    run_quantize({(int8_t*)out.data(), (float*)scales.data(), nullptr, (const char*)x.data(), k}, dtype, rows, num_threads);
}

void run_panels(LinearKind kind, const LinearArgs& args, int num_threads) {
    auto kernel = current_kernels().linear[kind];
    int threads = int(std::min<int64_t>(num_threads, 1 + args.steps * args.n * 4 * ((args.rows + 7) / 8) / BYTES_WORTH_A_THREAD));
    if (args.rows > 0) parallel_for(panels_of(args.n), threads, [&](int64_t panel) { kernel(args, panel, panel + 1); });
}

struct Operands {
    Dtype dtype, out_dtype;
    int64_t rows, k, n;
    const float* bias;
};

Operands operands_of(const Array& out, const Array& x, const Array* bias) {
    Dtype dtype = float_dtype(x, "x"), out_dtype = float_dtype(out, "out");
    require_float(x, "x", dtype, {-1, -1});
    require_contiguous(x, "x");
    require_float(out, "out", out_dtype, {int64_t(x.shape(0)), -1});
    require_contiguous(out, "out");
    if (bias) {
        require_float(*bias, "bias", FP32, {int64_t(out.shape(1))});
        require_contiguous(*bias, "bias");
    }
    return {dtype, out_dtype, int64_t(x.shape(0)), int64_t(x.shape(1)), int64_t(out.shape(1)), bias ? (const float*)bias->data() : nullptr};
}

void linear(const Array& out, const Array& x, const Array& packed, const Array* bias, int num_threads) {
    Operands o = operands_of(out, x, bias);
    if (is_bytes(packed) || float_dtype(packed, "packed") != o.dtype) throw nb::type_error("packed: dtype differs");
    require(o.dtype == BF16 || o.out_dtype == FP32, "out", "float32 expected");
    int items = 4 / item_bytes(o.dtype);
    require_packed(packed, "packed", o.n, o.k, items);
    LinearKind kind = o.dtype == FP32 ? FP32_FP32 : o.out_dtype == FP32 ? BF16_FP32 : BF16_BF16;
    nb::gil_scoped_release released;
    run_panels(kind, {(char*)out.data(), (const char*)x.data(), (const char*)packed.data(), o.bias, o.rows, o.n, o.k / items, nullptr, nullptr, nullptr}, num_threads);
}

// Rows of x rounded to int8, each with its scale, in memory that the calling thread keeps.
struct Rounded {
    int8_t* x;
    float* scales;
    int32_t* sums;

    Rounded(int64_t rows, int64_t steps) {
        thread_local std::vector<uint32_t> memory;
        if (memory.size() < size_t(rows * (steps + 2))) memory.resize(size_t(rows * (steps + 2)));
        x = (int8_t*)memory.data();
        scales = (float*)(x + rows * steps * 4);
        sums = (int32_t*)(scales + rows);
    }
};

// `columns`: of the weight before it was padded.
void linear_int8(const Array& out, const Array& x, const Array& packed, int64_t columns, const Array& scales, const Array* bias, int num_threads) {
    Operands o = operands_of(out, x, bias);
    require(o.k == columns, "x", "wrong shape");
    if (!is_bytes(packed)) throw nb::type_error("packed: int8 expected");
    require(o.k <= MAX_INT8_COLUMNS, "x", "too many columns");
    require_packed(packed, "packed", o.n, rotated_columns(o.k), 4);
    require_float(scales, "scales", FP32, {panels_of(o.n) * PANEL});
    require_contiguous(scales, "scales");
    nb::gil_scoped_release released;
    int64_t steps = rotated_columns(o.k) / 4;
    Rounded rounded(o.rows, steps);
    run_quantize({rounded.x, rounded.scales, rounded.sums, (const char*)x.data(), o.k}, o.dtype, o.rows, num_threads);
    run_panels(o.out_dtype == FP32 ? INT8_FP32 : INT8_BF16,
               {(char*)out.data(), (const char*)rounded.x, (const char*)packed.data(), o.bias, o.rows, o.n, steps, rounded.scales, rounded.sums, (const float*)scales.data()},
               num_threads);
}

}  // namespace

void bind_linear(nb::module_& m) {
    m.attr("PANEL") = PANEL;
    m.attr("ROTATED") = ROTATED;
    m.def("pack_linear", pack_linear, nb::arg("packed"), nb::arg("weight"));
    m.def("quantize_rows", quantize_rows, nb::arg("out"), nb::arg("scales"), nb::arg("x"), nb::arg("num_threads") = 1);
    m.def("linear", linear, nb::arg("out"), nb::arg("x"), nb::arg("packed"), nb::arg("bias").none() = nb::none(), nb::arg("num_threads") = 1);
    m.def("linear_int8", linear_int8, nb::arg("out"), nb::arg("x"), nb::arg("packed"), nb::arg("columns"), nb::arg("scales"), nb::arg("bias").none() = nb::none(), nb::arg("num_threads") = 1);
}

}  // namespace headrace
