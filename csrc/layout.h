// What is in memory: packed linears, and keys and values in pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"

namespace sakiyomi {

constexpr int64_t CACHE_LINE = 64, LARGE_PAGE = int64_t{2} << 20;

// Ask for large pages where there are any: with small ones, looking up addresses takes about a fifth of the time of
// reading what a forward reads.
void prefer_large_pages(char *data, int64_t size);

// Zeroed bytes, aligned to cache lines, large ones to large pages.
class Buffer {
  public:
    Buffer() = default;
    explicit Buffer(int64_t size) : size_(size) {
        const int64_t alignment = size < 2 * LARGE_PAGE ? CACHE_LINE : LARGE_PAGE;
        memory_ = static_cast<char *>(std::calloc(1, static_cast<size_t>(size + alignment)));
        if (!memory_) throw std::bad_alloc();
        data_ = memory_ + (alignment - reinterpret_cast<intptr_t>(memory_) % alignment);
        if (alignment == LARGE_PAGE) prefer_large_pages(data_, size);
    }
    Buffer(Buffer &&other) noexcept { *this = std::move(other); }
    Buffer &operator=(Buffer &&other) noexcept {
        std::swap(memory_, other.memory_);
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        return *this;
    }
    ~Buffer() { std::free(memory_); }

    char *data() const { return data_; }
    float *floats() const { return reinterpret_cast<float *>(data_); }
    int64_t size() const { return size_; }

  private:
    char *memory_ = nullptr, *data_ = nullptr;
    int64_t size_ = 0;
};

// Zeroed bytes for weights, which share chunks of large pages. A chunk goes when the last weights in it do.
class WeightMemory {
  public:
    explicit WeightMemory(int64_t size);
    char *data() const { return data_; }
    int64_t size() const { return size_; }

  private:
    int64_t size_;
    char *data_;
    std::shared_ptr<void> chunk_;
};

inline int64_t round_up(int64_t size, int64_t multiple) { return (size + multiple - 1) / multiple * multiple; }

inline float from_bf16(uint16_t half) {
    const uint32_t bits = static_cast<uint32_t>(half) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Memory for rows to multiply. What pads the rows is zero, and stays so as long as all rows have one size.
class OperandBuffer {
  public:
    OperandBuffer() = default;
    OperandBuffer(Kind kind, int64_t rows, int64_t depth)
        // Rows lie 64 bytes further apart than they need: at powers of two they would compete for places in the cache.
        : kind_(kind),
          stride_(depth * element_size(kind) + CACHE_LINE),
          groups_(kind == Kind::s8 || kind == Kind::s16 ? depth / DEPTH : 0),
          rows_((rows + SPARE_ROWS) * stride_),
          scales_(rows * groups_ * 4),
          sums_(rows * groups_ * 4) {}

    Operand operand() const {
        return {kind_, rows_.data(), stride_, scales_.floats(), reinterpret_cast<int32_t *>(sums_.data()), groups_};
    }

  private:
    Kind kind_ = Kind::f32;
    int64_t stride_ = 0, groups_ = 0;
    Buffer rows_, scales_, sums_;
};

// A linear whose weights have been packed. Filled row by row, in any order.
class Linear {
  public:
    // gated: the first half of the rows are gates, the others ups, laid side by side in blocks of 16 and 16.
    Linear(Format format, int64_t out_features, int64_t in_features, bool gated);

    // Pack rows [first, first + rows) from float32 (f32) or bfloat16 values, `stride` values from row to row.
    // Of int8, every value is rounded to a multiple of its row's largest / 127.
    void fill(int64_t first, int64_t rows, const void *values, Format source, int64_t stride);
    void fill_bias(int64_t first, int64_t rows, const float *values);

    // Undo the packing of one row: [in_features].
    void row(int64_t index, float *out) const;

    Weights weights() const;
    int64_t bytes() const { return data_.size(); }

    const Format format;
    const int64_t out_features, in_features, depth, blocks;
    const bool gated;

  private:
    int64_t column(int64_t row) const;  // where a row of the weight stands among the packed columns
    WeightMemory data_;
    std::vector<float> bias_, scales_;
};

// How keys and values of a sequence are laid out.
struct CacheShape {
    Format format;
    int layers, kv_heads, head_dim;

    int padded_dim() const { return static_cast<int>(round_up(head_dim, BLOCK)); }
    int64_t half_block() const { return int64_t{BLOCK} * padded_dim() * element_size(format); }  // keys; as many values
    int64_t block_bytes() const { return 2 * half_block(); }
    int64_t head_bytes() const { return PAGE / BLOCK * block_bytes(); }
    int64_t page_bytes() const { return head_bytes() * kv_heads * layers; }
    bool operator==(const CacheShape &other) const {
        return format == other.format && layers == other.layers && kv_heads == other.kv_heads &&
               head_dim == other.head_dim;
    }
};

// Keys and values of one sequence: pages of 256 tokens, each [layers][kv_heads][8 blocks][keys, values].
//
// A block's keys are packed like weights with 32 output features, its values like weights with a depth of 32, so that
// attention multiplies with the kernels that linears have. Slots that are not in use hold finite numbers always.
class Sequence {
  public:
    explicit Sequence(const CacheShape &shape) : shape(shape) {}

    void reserve(int64_t tokens);  // throws std::bad_alloc, and then nothing has changed
    int64_t capacity() const { return static_cast<int64_t>(pages_.size()) * PAGE; }
    char *block(int layer, int head, int64_t index) const {
        constexpr int64_t per_page = PAGE / BLOCK;
        const int64_t in_page = (int64_t{layer} * shape.kv_heads + head) * per_page + index % per_page;
        return pages_[static_cast<size_t>(index / per_page)].data() + in_page * shape.block_bytes();
    }
    // Keep, of the slots from `length` on, those at these ascending offsets, moved together.
    void keep(int64_t length, const int32_t *rows, int64_t count);

    const CacheShape shape;

  private:
    std::vector<Buffer> pages_;
};

// Copy one token's key and value of one head from a slot of a block to a slot of another.
void copy_slot(const CacheShape &shape, const char *from, int from_slot, char *to, int to_slot);

}  // namespace sakiyomi
