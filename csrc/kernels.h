// The seam between the decoder and the instruction paths: plain structs and one table of functions per path.
//
// This header and kernels.inl are compiled once per instruction path. They must not pull in inline functions of
// the standard library: the linker would keep one copy of them, perhaps the one with instructions that this
// processor lacks.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace sakiyomi {

constexpr int BLOCK = 32;  // output features of a block of weights; keys of a block of keys
constexpr int DEPTH = 64;  // input features are padded to a multiple of this; of int8 rows, so many share a scale
// Bytes of weights of a step along the depth: 32 columns x 4 bytes, that is 1 float32, 2 bf16 or 4 int8 of each.
constexpr int STEP_BYTES = 128;
constexpr int PAGE = 256;       // keys whose attention is one partial result
constexpr int QUERY_TILE = 64;  // query rows that attention takes together, at most
constexpr int MAX_HEAD = 512;   // head_dim, at most
constexpr int SPARE_ROWS = 32;  // kernels may read (never use) this many rows past the last

// Where in a block of keys and values a token's numbers are: the key's element i at key_place(), in the half of the
// block that values follow, the value's at value_place(); both in elements, of which a step has `per_step`.
constexpr int64_t key_place(int slot, int i, int per_step) {
    return (int64_t{i} / per_step * BLOCK + slot) * per_step + i % per_step;
}
constexpr int64_t value_place(int slot, int i, int per_step) {
    return int64_t{i} / BLOCK * BLOCK * BLOCK + (slot / per_step * BLOCK + i % BLOCK) * per_step + slot % per_step;
}

// How weights, or keys and values, are stored.
enum class Format : int32_t { f32 = 0, bf16 = 1, int8 = 2 };

// How the rows are stored that weights are multiplied with: each path has its own choice for each format.
enum class Kind : int32_t { f32, bf16, s8, s16 };

constexpr int elements_per_step(Format format) { return format == Format::f32 ? 1 : format == Format::bf16 ? 2 : 4; }
constexpr int element_size(Format format) { return format == Format::f32 ? 4 : format == Format::bf16 ? 2 : 1; }
constexpr int element_size(Kind kind) { return kind == Kind::f32 ? 4 : kind == Kind::s8 ? 1 : 2; }

// A packed linear, y = x W^T + b: blocks of 32 output features, in each the steps along the depth.
struct Weights {
    Format format;
    const char *data;  // [blocks][depth / elements per step][32][elements per step], zeros where padded
    int64_t depth;     // padded in_features
    int64_t blocks;
    const float *bias;    // [blocks * 32], or null
    const float *scales;  // int8: [blocks * 32]; a weight is its column's scale x (its byte - 128)
};

// Rows to multiply. Of integers (s8, s16) every 64 features have a scale, and the sum of the integers x 128.
struct Operand {
    Kind kind;
    char *data;
    int64_t stride;  // bytes from row to row
    float *scales;   // [rows][groups]
    int32_t *sums;   // [rows][groups]
    int64_t groups;
};

enum class Finish : int32_t {
    store,     // out = y
    add,       // out += y
    silu_mul,  // blocks hold 16 gates and 16 ups: destination = silu(gate) * up
};

struct LinearCall {
    Weights weights;
    Operand in;
    int64_t rows;
    Finish finish;
    float *out;  // store, add: [rows][out_stride]
    int64_t out_stride;
    Operand destination;  // silu_mul: f32 or bf16
};

// Where a row's keys and values go: pointers to the start of its key block of each head.
struct RotateCall {
    const float *qkv;         // [(heads + 2 kv_heads) * head_dim]
    const float *rope;        // [2][head_dim / 2]: cosines, sines
    const float *query_norm;  // [head_dim], or null
    const float *key_norm;
    float eps;
    int heads, kv_heads, head_dim, padded_dim;
    Format format;  // of keys and values
    char *queries;  // of the row; a head of group g of kv head h at h * queries_stride + g * head bytes
    int64_t queries_stride;
    char *keys;           // key block of kv head 0; head h at + h * head_stride; values follow the keys
    int64_t head_stride;  // bytes
    int slot;             // in the key block
};

// Query rows that follow one another, and the last blocks of their keys where others of the tile have other ones.
struct Branch {
    int first, rows;   // of the tile; a row's own position is `position` and 1 for every `group` rows before it
    int64_t position;  // of the first row
    const char *const *blocks;  // after those of all rows
    int block_count;
};

// Attention of a tile of query rows to the keys of one page: acc = sum of p V, not yet divided by the sum of p.
struct AttendCall {
    Format format;
    const char *queries;  // [rows][padded_dim]
    int rows, group;
    int padded_dim;
    float scale;
    const char *const *blocks;  // of the keys that all rows have, values after them
    int block_count;
    const Branch *branches;  // together all rows, in their order
    int branch_count;
    int64_t first_key;  // position of the first key
    int64_t window;     // how many tokens back a row sees, itself included
    float *scores;      // scratch: [QUERY_TILE][PAGE]
    char *weights;      // scratch: [QUERY_TILE][PAGE] floats
    float *acc;         // [QUERY_TILE][padded_dim]
    float *highest;     // [rows]: highest score
    float *sum;         // [rows]
};

// The partial results of a query row over pages, brought together.
struct MergeCall {
    int pages, head_dim;
    const float *acc;  // of the first page; the next at + acc_stride floats
    int64_t acc_stride;
    const float *highest, *sum;  // the next page's at + stat_stride
    int64_t stat_stride;
    float scale;
    float *shares;        // scratch: [pages]
    Operand destination;  // data already at the row and the head
};

struct Kernels {
    const char *name;
    Kind (*kind)(Format);  // what rows a format is multiplied with
    void (*begin)();       // on each thread before the others, and after them
    void (*end)();
    // y = x / rms(x) * weight as row `row` of `out` (weight may be null: y = x)
    void (*norm)(const float *x, const float *weight, int64_t size, float eps, const Operand &out, int64_t row);
    void (*linear)(const LinearCall &, int64_t first_block, int64_t last_block);
    void (*rotate)(const RotateCall &);
    void (*attend)(const AttendCall &);
    void (*merge)(const MergeCall &);
    // sum of e^(x - largest)
    float (*sum_exp)(const float *x, int64_t size, float largest);
};

// Null where the build doesn't have the path.
const Kernels *plain_kernels();
const Kernels *avx2_kernels();
const Kernels *avx512_kernels();
const Kernels *avx512_bf16_kernels();
const Kernels *amx_kernels();

}  // namespace sakiyomi
