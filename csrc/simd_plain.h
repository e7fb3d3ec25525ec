// One float at a time: what the compiler makes of it, on any processor.
#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

namespace sakiyomi {
namespace {

using V = float;
constexpr int W = 1;

inline V load(const float *p) { return *p; }
inline V load_n(const float *p, int) { return *p; }
inline void store(float *p, V x) { *p = x; }
inline void store_n(float *p, V x, int) { *p = x; }
inline V set1(float x) { return x; }
inline V add(V a, V b) { return a + b; }
inline V sub(V a, V b) { return a - b; }
inline V mul(V a, V b) { return a * b; }
inline V div(V a, V b) { return a / b; }
inline V fma(V a, V b, V c) {
#ifdef __FP_FAST_FMAF
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
inline V max(V a, V b) { return a > b ? a : b; }
inline V abs(V a) { return a < 0 ? -a : a; }
inline float sum(V x) { return x; }
inline float highest(V x) { return x; }
inline V exp(V x) { return ::expf(x); }

inline void store_bf16(uint16_t *p, V x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x)
        *p = static_cast<uint16_t>((bits >> 16) | 0x40);
    else
        *p = static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
inline void store_bf16_n(uint16_t *p, V x, int) { store_bf16(p, x); }

// Store 64 values as whole numbers and return their sum.
inline int32_t store_s8(int8_t *p, const float *x) {
    int32_t sum = 0;
    for (int i = 0; i < 64; ++i) sum += p[i] = static_cast<int8_t>(lrintf(x[i]));
    return sum;
}
// The same, of every four: 0, 2, 1, 3.
inline int32_t store_s16(int16_t *p, const float *x) {
    int32_t sum = 0;
    for (int i = 0; i < 64; i += 4)
        for (int j = 0; j < 4; ++j) sum += p[i + (j & 1) * 2 + j / 2] = static_cast<int16_t>(lrintf(x[i + j]));
    return sum;
}

}  // namespace
}  // namespace sakiyomi
