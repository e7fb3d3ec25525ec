// A decoder of the Llama family: the whole forward pass of some rows of some sequences.
#pragma once

#include <array>
#include <memory>
#include <mutex>
#include <vector>

#include "layout.h"
#include "pool.h"

namespace sakiyomi {

using SharedLinear = std::shared_ptr<const Linear>;

struct Layer {
    std::vector<float> attention_norm, query_norm, key_norm, mlp_norm;  // empty: no norm
    SharedLinear qkv, output, gate_up, down;
    int64_t window;  // how many tokens back attention reaches, the token itself included
};

struct DecoderShape {
    int layers, heads, kv_heads, head_dim;
    int64_t hidden;
    Format cache;
    float eps, attention_scale;
};

// Rows to append to one sequence.
struct Part {
    Sequence *sequence;
    int64_t length;  // tokens that the sequence holds
    int64_t rows;
    const int32_t *parents;  // [rows]: the row before each, -1 for the end of the sequence; null for a chain
    int64_t logit_rows;      // logits are wanted for this many rows, the last ones
};

// What one call computes. All rows are float32, the parts' rows one after the other.
struct Batch {
    std::vector<Part> parts;
    // What the first layer adds to: tokens' embeddings, or inputs. Both where the decoder has norms for both.
    const int64_t *tokens;          // [rows]
    const float *inputs;            // [rows][hidden]
    const float *attention_inputs;  // [rows][in_features of qkv], or null: the norm of the inputs
    const float *rope;              // [positions][2][head_dim / 2]
    float *logits;                  // [wanted rows][logits_stride]
    int64_t logits_stride;
    std::vector<std::pair<int, float *>> hidden;  // (layers run, [rows][hidden])

    bool both() const { return tokens && inputs; }
};

class Pass;
class Plan;

class Decoder : public std::enable_shared_from_this<Decoder> {
  public:
    Decoder(const DecoderShape &shape, const Kernels &kernels) : shape(shape), kernels_(kernels) {}

    // Throws std::invalid_argument if the parts don't fit together.
    void check() const;

    // Throws std::bad_alloc or std::invalid_argument before anything is written. Makes room in the sequences.
    void forward(const Batch &batch, int threads) const;

    CacheShape cache_shape() const { return {shape.cache, shape.layers, shape.kv_heads, shape.head_dim}; }

    const DecoderShape shape;
    std::vector<Layer> layers;
    std::vector<float> norm;
    // Where a batch has tokens and inputs: the first qkv sees the norms of both, the token's first, and the first layer
    // adds to the inputs, or to their norm.
    std::vector<float> token_norm, input_norm;
    bool norm_residual = false;
    SharedLinear head;                // null: no logits
    const void *embedding = nullptr;  // [vocabulary][hidden], or null: the head's rows
    Format embedding_format = Format::f32;

  private:
    friend class Pass;
    friend class Plan;
    enum Use { INPUT, NORMED, ATTENDED, GATED, USES };

    // Memory between the steps of a forward. Never resized: a thread that comes late may still look at its pointers.
    struct Scratch {
        int64_t rows = 0, own_bytes = 0;  // own_bytes: of each thread
        Buffer residual, both, qkv, queries, staged, threads, partials;
        std::array<std::array<OperandBuffer, 4>, USES> operands;  // by use and kind
    };

    // Scratch for a plan: the one given, if it is large enough.
    std::shared_ptr<const Scratch> fitted(std::shared_ptr<const Scratch> scratch, const Plan &plan) const;

    const Kernels &kernels_;
    mutable std::mutex mutex_;  // of scratch_, which a forward takes for itself and gives back
    mutable std::shared_ptr<const Scratch> scratch_;
};

}  // namespace sakiyomi
