#include <algorithm>
#include <cmath>

#include "layout.h"

namespace sakiyomi {

namespace {

uint16_t to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if (value != value) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace

Linear::Linear(Format format, int64_t out_features, int64_t in_features, bool gated)
    : format(format),
      out_features(out_features),
      in_features(in_features),
      depth(round_up(in_features, DEPTH)),
      blocks(gated ? round_up(out_features / 2, BLOCK / 2) / (BLOCK / 2) : round_up(out_features, BLOCK) / BLOCK),
      gated(gated),
      data_(blocks * BLOCK * depth * element_size(format)) {
    if (format != Format::int8) return;
    std::memset(data_.data(), 128, static_cast<size_t>(data_.size()));  // zeros
    scales_.resize(static_cast<size_t>(blocks * BLOCK));
}

int64_t Linear::column(int64_t row) const {
    if (!gated) return row;
    constexpr int64_t half = BLOCK / 2;
    const int64_t part = row >= out_features / 2 ? 1 : 0, index = row - part * (out_features / 2);
    return index / half * BLOCK + part * half + index % half;
}

void Linear::fill(int64_t first, int64_t rows, const void *values, Format source, int64_t stride) {
    const int step = elements_per_step(format);
    std::vector<float> row(static_cast<size_t>(in_features));
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t to = column(first + r);
        char *block = data_.data() + to / BLOCK * (depth / step) * STEP_BYTES + to % BLOCK * 4;
        if (format == Format::bf16 && source == Format::bf16) {
            const auto *from = static_cast<const uint16_t *>(values) + r * stride;
            int64_t i = 0;
            for (; i + 2 <= in_features; i += 2) std::memcpy(block + i / 2 * STEP_BYTES, from + i, 4);
            if (i < in_features) std::memcpy(block + i / 2 * STEP_BYTES, from + i, 2);
            continue;
        }
        for (int64_t i = 0; i < in_features; ++i)
            row[static_cast<size_t>(i)] = source == Format::bf16
                                              ? from_bf16(static_cast<const uint16_t *>(values)[r * stride + i])
                                              : static_cast<const float *>(values)[r * stride + i];
        if (format == Format::f32) {
            for (int64_t i = 0; i < in_features; ++i)
                std::memcpy(block + i * STEP_BYTES, &row[static_cast<size_t>(i)], 4);
        } else if (format == Format::bf16) {
            for (int64_t i = 0; i < in_features; ++i) {
                const uint16_t half = to_bf16(row[static_cast<size_t>(i)]);
                std::memcpy(block + i / 2 * STEP_BYTES + i % 2 * 2, &half, 2);
            }
        } else {
            float top = 0, unfit = 0;
            for (const float x : row) {
                top = std::max(top, std::fabs(x));
                unfit += x * 0.0f;
            }
            for (int64_t i = 0; i < in_features; ++i) {
                const float scaled = top > 0 && unfit == 0 ? row[static_cast<size_t>(i)] * (127.0f / top) : 0.0f;
                block[i / 4 * STEP_BYTES + i % 4] = static_cast<char>(std::lrint(scaled) + 128);
            }
            scales_[static_cast<size_t>(to)] = top / 127.0f + unfit;  // not a number where one value is none
        }
    }
}

void Linear::fill_bias(int64_t first, int64_t rows, const float *values) {
    bias_.resize(static_cast<size_t>(blocks * BLOCK));
    for (int64_t r = 0; r < rows; ++r) bias_[static_cast<size_t>(column(first + r))] = values[r];
}

void Linear::row(int64_t index, float *out) const {
    const int step = elements_per_step(format);
    const int64_t from = column(index);
    const char *block = data_.data() + from / BLOCK * (depth / step) * STEP_BYTES + from % BLOCK * 4;
    for (int64_t i = 0; i < in_features; ++i) {
        const char *at = block + i / step * STEP_BYTES + i % step * element_size(format);
        if (format == Format::f32) {
            std::memcpy(out + i, at, 4);
        } else if (format == Format::bf16) {
            uint16_t half;
            std::memcpy(&half, at, 2);
            out[i] = from_bf16(half);
        } else {
            out[i] = static_cast<float>(static_cast<unsigned char>(*at) - 128) * scales_[static_cast<size_t>(from)];
        }
    }
}

Weights Linear::weights() const {
    return {format,
            data_.data(),
            depth,
            blocks,
            bias_.empty() ? nullptr : bias_.data(),
            scales_.empty() ? nullptr : scales_.data()};
}

}  // namespace sakiyomi
