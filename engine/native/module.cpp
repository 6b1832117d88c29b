// The Python module headrace_native: checks what it is given, cuts it into units, runs them on the fastest kernels of this machine.
// Arrays are used in place (never converted, never copied); the GIL is released while kernels run.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <vector>

#include "arrays.h"
#include "attention_plan.h"

namespace headrace {
namespace {

// ---- which kernels -------------------------------------------------------------------------------------------------------------

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> best_first;
#if defined(__x86_64__)
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (vnni && __builtin_cpu_supports("avx512bf16")) best_first.push_back(&avx512bf16_kernels());
    if (vnni) best_first.push_back(&avx512vnni_kernels());
    if (avx512) best_first.push_back(&avx512_kernels());
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) best_first.push_back(&avx2_kernels());
#endif
    best_first.push_back(&generic_kernels());
    return best_first;
}

std::atomic<const Kernels*> chosen{supported_kernels().front()};

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const Kernels* kernels : supported_kernels()) names.push_back(kernels->name);
    return names;
}

void use_instruction_set(const std::string& name) {
    for (const Kernels* kernels : supported_kernels())
        if (name == kernels->name) {
            chosen = kernels;
            return;
        }
    throw nb::value_error(("instruction set not supported here: " + name).c_str());
}

// ---- checks --------------------------------------------------------------------------------------------------------------------

Pool pool_of(const Array& a, Dtype dtype, int64_t layer) {
    require_float(a, "pool", dtype, {-1, -1, -1, 2, -1, -1});
    require_contiguous(a, "pool");
    Pool pool{(char*)a.data(), int64_t(a.shape(0)), int64_t(a.shape(1)), int64_t(a.shape(2)), int64_t(a.shape(4)), int64_t(a.shape(5)), item_bytes(dtype)};
    require(layer >= 0 && layer < pool.layers, "layer", "out of range");
    require(pool.block_tokens % RUN_TOKENS == 0, "pool", "block tokens are no multiple of 32");
    require(pool.head_dim % 2 == 0 && pool.head_dim <= 256, "pool", "head dim must be even and at most 256");
    return pool;
}

const int64_t* slots_of(const Array& a, const Pool& pool, int64_t rows) {
    const int64_t* slots = integers<int64_t>(a, "slots", 1, rows);
    for (int64_t i = 0; i < rows; ++i) require(slots[i] >= -1 && slots[i] < pool.num_blocks * pool.block_tokens, "slots", "outside the pool");
    return slots;
}

void check_sequences(const Pool& pool, const int32_t* tables, int64_t max_blocks, const int32_t* starts, const int32_t* lens, int64_t sequences, int64_t rows) {
    require(starts[0] == 0 && starts[sequences] == rows, "query_starts", "must cover all rows");
    for (int64_t s = 0; s < sequences; ++s) {
        int64_t queries = int64_t(starts[s + 1]) - starts[s], blocks = (int64_t(lens[s]) + pool.block_tokens - 1) / pool.block_tokens;
        require(queries >= 0, "query_starts", "must ascend");
        require(lens[s] >= queries, "context_lens", "smaller than the number of queries");
        require(blocks <= max_blocks, "block_tables", "too short for the context");
        for (int64_t i = 0; queries > 0 && i < blocks; ++i)
            require(tables[s * max_blocks + i] >= 0 && tables[s * max_blocks + i] < pool.num_blocks, "block_tables", "outside the pool");
    }
}

void paged_attention(const Array& out, const Array& q, const Array& pool_, int64_t layer, const Array& block_tables, const Array& query_starts,
                     const Array& context_lens, float scale, int num_threads, int64_t window, int64_t sinks) {
    Dtype dtype = float_dtype(q, "q");
    Pool pool = pool_of(pool_, dtype, layer);
    require_float(q, "q", dtype, {-1, -1, pool.head_dim});
    require_rows(q, "q");
    int64_t rows = int64_t(q.shape(0)), heads = int64_t(q.shape(1));
    require(heads % pool.kv_heads == 0 && heads / pool.kv_heads <= ATTENTION_ROWS, "q", "heads must be a multiple of the pool's KV heads, at most 96 of each");
    require_float(out, "out", dtype, {rows, heads, pool.head_dim});
    require_contiguous(out, "out");
    require(scale > 0, "scale", "must be positive");
    require(window >= 0 && sinks >= 0, "window, sinks", "must not be negative");
    const int32_t* tables = integers<int32_t>(block_tables, "block_tables", 2, -1);
    int64_t sequences = int64_t(block_tables.shape(0)), max_blocks = int64_t(block_tables.shape(1));
    const int32_t* starts = integers<int32_t>(query_starts, "query_starts", 1, sequences + 1);
    const int32_t* lens = integers<int32_t>(context_lens, "context_lens", 1, sequences);

    nb::gil_scoped_release released;
    check_sequences(pool, tables, max_blocks, starts, lens, sequences, rows);
    AttentionArgs args{(char*)out.data(), (const char*)q.data(), row_stride(q), pool, layer, heads, scale, window, window > 0 ? sinks : 0};
    const Kernels& kernels = current_kernels();
    AttentionPlan plan(args, kernels, tables, max_blocks, starts, lens, sequences, num_threads);
    parallel_for(plan.items(), num_threads, [&](int64_t item) { plan.run(item, dtype, thread_scratch(plan.scratch_bytes())); });
}

void write_kv(const Array& pool_, int64_t layer, const Array& k, const Array& v, const Array& slots_) {
    Dtype dtype = float_dtype(k, "k");
    Pool pool = pool_of(pool_, dtype, layer);
    int64_t rows = int64_t(k.ndim() > 0 ? k.shape(0) : 0);
    require_float(k, "k", dtype, {rows, pool.kv_heads, pool.head_dim});
    require_float(v, "v", dtype, {rows, pool.kv_heads, pool.head_dim});
    require_rows(k, "k");
    require_rows(v, "v");
    const int64_t* slots = slots_of(slots_, pool, rows);

    nb::gil_scoped_release released;
    size_t bytes = size_t(pool.head_dim) * pool.item_bytes;
    for (int64_t row = 0; row < rows; ++row) {
        if (slots[row] < 0) continue;
        for (int64_t head = 0; head < pool.kv_heads; ++head) {
            char* keys = pool.block(slots[row] / pool.block_tokens, head, layer) + slots[row] % pool.block_tokens * bytes;
            std::memcpy(keys, (const char*)k.data() + (row * row_stride(k) + head * pool.head_dim) * pool.item_bytes, bytes);
            std::memcpy(keys + pool.plane_bytes(), (const char*)v.data() + (row * row_stride(v) + head * pool.head_dim) * pool.item_bytes, bytes);
        }
    }
}

void rope_write_kv(const Array& qkv, const Array& positions_, const Array& cos, const Array& sin, const Array& pool_, int64_t layer, const Array& slots_, int num_threads) {
    Dtype dtype = float_dtype(qkv, "qkv");
    Pool pool = pool_of(pool_, dtype, layer);
    require_float(qkv, "qkv", dtype, {-1, -1});
    require_rows(qkv, "qkv");
    int64_t rows = int64_t(qkv.shape(0)), heads = int64_t(qkv.shape(1)) / pool.head_dim - 2 * pool.kv_heads;
    require(heads > 0 && int64_t(qkv.shape(1)) % pool.head_dim == 0, "qkv", "wrong width");
    require_float(cos, "cos", FP32, {-1, pool.head_dim / 2});
    require_float(sin, "sin", FP32, {int64_t(cos.shape(0)), pool.head_dim / 2});
    require_contiguous(cos, "cos");
    require_contiguous(sin, "sin");
    const int64_t* positions = integers<int64_t>(positions_, "positions", 1, rows);
    for (int64_t i = 0; i < rows; ++i) require(positions[i] >= 0 && positions[i] < int64_t(cos.shape(0)), "positions", "outside the rotary table");
    RopeArgs args{(char*)qkv.data(), row_stride(qkv), heads, positions, slots_of(slots_, pool, rows), (const float*)cos.data(), (const float*)sin.data(), pool, layer};

    nb::gil_scoped_release released;
    const Kernels& kernels = current_kernels();
    over_rows(rows, int64_t(qkv.shape(1)) * 4, num_threads, [&](int64_t first, int64_t last) { kernels.rope[dtype](args, first, last); });
}

void run_norm(const Array& out, const Array* residual, const Array& x, const Array& weight, float eps, int num_threads) {
    Dtype dtype = float_dtype(out, "out");
    require_float(x, "x", FP32, {-1, -1});
    int64_t rows = int64_t(x.shape(0)), size = int64_t(x.shape(1));
    require_float(out, "out", dtype, {rows, size});
    require_float(weight, "weight", dtype, {size});
    for (const Array* a : {&x, &out, &weight}) require_contiguous(*a, "x, out, weight");
    if (residual) {
        require_float(*residual, "residual", FP32, {rows, size});
        require_contiguous(*residual, "residual");
    }
    NormArgs args{(char*)out.data(), residual ? (float*)residual->data() : nullptr, (const float*)x.data(), (const char*)weight.data(), size, eps};

    nb::gil_scoped_release released;
    const Kernels& kernels = current_kernels();
    over_rows(rows, size * 4, num_threads, [&](int64_t first, int64_t last) { kernels.norm[dtype](args, first, last); });
}

void rms_norm(const Array& out, const Array& x, const Array& weight, float eps, int num_threads) { run_norm(out, nullptr, x, weight, eps, num_threads); }

void add_rms_norm(const Array& out, const Array& residual, const Array& x, const Array& weight, float eps, int num_threads) {
    run_norm(out, &residual, x, weight, eps, num_threads);
}

void silu_mul(const Array& out, const Array& gate_up, int num_threads) {
    Dtype dtype = float_dtype(out, "out");
    require_float(out, "out", dtype, {-1, -1});
    int64_t rows = int64_t(out.shape(0)), size = int64_t(out.shape(1));
    require_float(gate_up, "gate_up", dtype, {rows, 2 * size});
    require_contiguous(out, "out");
    require_contiguous(gate_up, "gate_up");

    nb::gil_scoped_release released;
    const Kernels& kernels = current_kernels();
    over_rows(rows, size * 8, num_threads, [&](int64_t first, int64_t last) { kernels.silu_mul[dtype]((char*)out.data(), (const char*)gate_up.data(), size, first, last); });
}

}  // namespace

const Kernels& current_kernels() { return *chosen.load(); }

}  // namespace headrace

NB_MODULE(headrace_native, m) {
    using namespace headrace;
    nb::class_<Array>(m, "Array", "A tensor wrapped once, to be passed many times where a tensor is expected.").def(nb::init<NdArray>(), nb::arg("tensor"));
    nb::implicitly_convertible<NdArray, Array>();
    m.def("instruction_sets", instruction_sets, "Instruction sets of this machine that there are kernels for, the fastest first.");
    m.def("instruction_set", [] { return std::string(chosen.load()->name); });
    m.def("use_instruction_set", use_instruction_set, nb::arg("name"), "For tests: take other kernels than the fastest, in the whole process.");
    m.def("paged_attention", paged_attention, nb::arg("out"), nb::arg("q"), nb::arg("pool"), nb::arg("layer"), nb::arg("block_tables"), nb::arg("query_starts"),
          nb::arg("context_lens"), nb::arg("scale"), nb::arg("num_threads") = 1, nb::arg("window") = 0, nb::arg("sinks") = 0);
    m.def("write_kv", write_kv, nb::arg("pool"), nb::arg("layer"), nb::arg("k"), nb::arg("v"), nb::arg("slots"));
    m.def("rope_write_kv", rope_write_kv, nb::arg("qkv"), nb::arg("positions"), nb::arg("cos"), nb::arg("sin"), nb::arg("pool"), nb::arg("layer"), nb::arg("slots"),
          nb::arg("num_threads") = 1);
    m.def("rms_norm", rms_norm, nb::arg("out"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("num_threads") = 1);
    m.def("add_rms_norm", add_rms_norm, nb::arg("out"), nb::arg("residual"), nb::arg("x"), nb::arg("weight"), nb::arg("eps"), nb::arg("num_threads") = 1);
    m.def("silu_mul", silu_mul, nb::arg("out"), nb::arg("gate_up"), nb::arg("num_threads") = 1);
    bind_linear(m);
    bind_roofline(m);
}
