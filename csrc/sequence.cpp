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

void copy_slot(const CacheShape &shape, const char *from, int from_slot, char *to, int to_slot) {
    const int per_step = elements_per_step(shape.format), dim = shape.padded_dim();
    const auto size = int64_t{element_size(shape.format)};
    for (int i = 0; i < dim; i += per_step)
        std::memcpy(to + key_place(to_slot, i, per_step) * size, from + key_place(from_slot, i, per_step) * size, 4);
    from += shape.half_block();
    to += shape.half_block();
    for (int i = 0; i < dim; ++i)
        std::memcpy(to + value_place(to_slot, i, per_step) * size, from + value_place(from_slot, i, per_step) * size,
                    static_cast<size_t>(size));
}

}  // namespace sakiyomi
