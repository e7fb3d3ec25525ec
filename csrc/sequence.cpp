#include "layout.h"

namespace sakiyomi {

void Sequence::reserve(int64_t tokens) {
    std::vector<Buffer> more;
    while (capacity() + static_cast<int64_t>(more.size()) * PAGE < tokens) more.emplace_back(shape.page_bytes());
    pages_.reserve(pages_.size() + more.size());
    for (auto &page : more) pages_.push_back(std::move(page));
}

void Sequence::keep(int64_t length, const int32_t *rows, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t from = length + rows[i], to = length + i;
        if (from == to) continue;
        for (int layer = 0; layer < shape.layers; ++layer)
            for (int head = 0; head < shape.kv_heads; ++head)
                copy_slot(shape, block(layer, head, from / BLOCK), static_cast<int>(from % BLOCK),
                          block(layer, head, to / BLOCK), static_cast<int>(to % BLOCK));
    }
}

namespace {

// T holds one step of a key: two bf16, or one float32. U is one value.
template <class T, class U>
void copy(const CacheShape &shape, const char *from, int from_slot, char *to, int to_slot) {
    constexpr int STEP = sizeof(T) / sizeof(U);
    const int dim = shape.padded_dim();
    const auto *key = reinterpret_cast<const T *>(from) + from_slot;
    auto *key_to = reinterpret_cast<T *>(to) + to_slot;
    for (int i = 0; i < dim / STEP; ++i) key_to[i * BLOCK] = key[i * BLOCK];
    const auto place = [](int slot) { return slot / STEP * BLOCK * STEP + slot % STEP; };
    const auto *value = reinterpret_cast<const U *>(from + shape.half_block()) + place(from_slot);
    auto *value_to = reinterpret_cast<U *>(to + shape.half_block()) + place(to_slot);
    for (int i = 0; i < dim; ++i) {
        const int at = i / BLOCK * BLOCK * BLOCK + i % BLOCK * STEP;
        value_to[at] = value[at];
    }
}

}  // namespace

void copy_slot(const CacheShape &shape, const char *from, int from_slot, char *to, int to_slot) {
    if (shape.format == Format::f32)
        copy<uint32_t, uint32_t>(shape, from, from_slot, to, to_slot);
    else
        copy<uint32_t, uint16_t>(shape, from, from_slot, to, to_slot);
}

}  // namespace sakiyomi
