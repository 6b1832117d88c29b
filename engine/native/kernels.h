// The table of kernels that each instruction set fills, and the arguments that they share.
//
// Owns no threads and no memory. Invariant (batch invariance): what a kernel writes for one row depends on that row's
// inputs alone; the order of every reduction follows from its length, TILE_TOKENS and RANGE_TOKENS, never from the number of rows,
// from chunking, from threads or from the rows computed beside it.
#pragma once
#include <cstddef>
#include <cstdint>

namespace headrace {

enum Dtype { BF16 = 0, FP32 = 1 };

constexpr int PANEL = 64;        // outputs of a matrix product that are packed side by side
constexpr int ROTATED = 64;      // values that the rotation before rounding to int8 mixes
constexpr float ROTATION_NORM = 8.f;  // sqrt(ROTATED)
constexpr int RUN_TOKENS = 32;   // K/V tokens that lie side by side: block_tokens is a multiple of it
constexpr int TILE_TOKENS = 64;  // that one softmax update covers
constexpr int RANGE_TOKENS = 512;  // whose softmax is complete in itself; a query merges its ranges in the order of its context
constexpr int MAX_ATTENTION_ROWS = 256;  // queries x heads of a group of one unit

struct Pool {  // [num_blocks][kv head][layer][K, V][token][dim]
    char* data;
    int64_t num_blocks, kv_heads, layers, block_tokens, head_dim;
    int item_bytes;

    char* block(int64_t block, int64_t head, int64_t layer) const {
        return data + ((block * kv_heads + head) * layers + layer) * 2 * plane_bytes();
    }
    int64_t plane_bytes() const { return block_tokens * head_dim * item_bytes; }
};

struct AttentionArgs {
    char* out;      // [T, H, D]
    const char* q;  // [T, H, D], rows `q_stride` elements apart
    int64_t q_stride;
    Pool pool;
    int64_t layer;
    int64_t heads;
    float scale;     // > 0
    int64_t window;  // a query sees the last `window` tokens up to itself, all if 0,
    int64_t sinks;   // and the first `sinks` ones
};

// A tile of one sequence's queries against ranges of one KV head's tokens.
struct AttentionUnit {
    const int32_t* block_table;
    int64_t first_row;       // of the batch
    int64_t first_position;  // of first_row in its sequence
    int64_t kv_head;
    int queries;
    int first_range, last_range;
    char* partials;  // null: the unit has all ranges and writes its rows; else where each range's state goes, to be merged

    int64_t context() const { return first_position + queries; }
};

struct NormArgs {
    char* out;        // [T, N], dtype of the kernel
    float* residual;  // [T, N] or null: receives residual + x
    const float* x;   // [T, N]
    const char* weight;
    int64_t size;
    float eps;
};

struct RopeArgs {
    char* qkv;  // [T, H + 2 KH, D], rows `stride` elements apart
    int64_t stride, heads;
    const int64_t* positions;
    const int64_t* slots;
    const float* cos;  // [max_positions, D / 2]
    const float* sin;
    Pool pool;
    int64_t layer;
};

struct QuantizeArgs {
    int8_t* out;    // [T, K rounded up to ROTATED]
    float* scales;  // [T]
    int32_t* sums;  // [T] of the rounded values, or null
    const char* x;  // [T, K]
    int64_t k;
};

struct LinearArgs {
    char* out;              // [T, N]
    const char* x;          // [T, steps] of 32 bits
    const char* weight;     // packed, see linear.h
    const float* bias;      // [N] or null
    int64_t rows, n, steps;
    const float* x_scales;  // the rest only for int8: [T]
    const int32_t* x_sums;  // [T]
    const float* scales;    // [panels, PANEL]
};

enum LinearKind { BF16_BF16, BF16_FP32, FP32_FP32, INT8_BF16, INT8_FP32, LINEAR_KINDS };  // x and weight, out
enum Peak { PEAK_BF16, PEAK_FP32, PEAK_INT8, PEAKS };

struct Kernels {
    const char* name;
    // Bytes, 64-byte aligned, that a unit of `rows` (queries x heads of a group) needs, and that the state of a range of it takes.
    size_t (*attention_scratch_bytes)(int64_t rows, int64_t head_dim);
    size_t (*attention_partial_bytes)(int64_t rows, int64_t head_dim);
    void (*attention[2])(const AttentionArgs&, const AttentionUnit* first, const AttentionUnit* last, char* scratch);
    void (*attention_merge[2])(const AttentionArgs&, const AttentionUnit& whole, char* scratch);  // writes the rows of all its ranges' partials
    void (*norm[2])(const NormArgs&, int64_t first, int64_t last);
    void (*silu_mul[2])(char* out, const char* gate_up, int64_t size, int64_t first, int64_t last);
    void (*rope[2])(const RopeArgs&, int64_t first, int64_t last);
    void (*quantize[2])(const QuantizeArgs&, int64_t first, int64_t last, float* rotated);  // rotated: scratch for one row
    void (*linear[LINEAR_KINDS])(const LinearArgs&, int64_t first_panel, int64_t last_panel);
    uint64_t (*read)(const char* data, int64_t bytes);        // a checksum: one streaming pass
    int64_t (*multiply[PEAKS])(int64_t repeats, float* sink);  // multiplications of a register-blocked loop without memory
};

const Kernels& generic_kernels();
#if defined(__x86_64__)
const Kernels& avx2_kernels();
const Kernels& avx512_kernels();
const Kernels& avx512vnni_kernels();
const Kernels& avx512bf16_kernels();
#endif

}  // namespace headrace
