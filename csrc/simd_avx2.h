// Eight floats at a time.
#pragma once

#include <immintrin.h>

#include <stdint.h>

namespace sakiyomi {
namespace {

using V = __m256;
constexpr int W = 8;

inline __m256i lanes(int n) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
inline V load(const float *p) { return _mm256_loadu_ps(p); }
inline V load_n(const float *p, int n) { return _mm256_maskload_ps(p, lanes(n)); }
inline void store(float *p, V x) { _mm256_storeu_ps(p, x); }
inline void store_n(float *p, V x, int n) { _mm256_maskstore_ps(p, lanes(n), x); }
inline V set1(float x) { return _mm256_set1_ps(x); }
inline V add(V a, V b) { return _mm256_add_ps(a, b); }
inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
inline V div(V a, V b) { return _mm256_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm256_max_ps(a, b); }  // b where either isn't a number
inline V abs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
inline float sum(V x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
inline float highest(V x) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_movehdup_ps(s)));
}

inline V power_of_2(V n) {  // of whole numbers in -127..127; 2^-127 is 0
    __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_castsi256_ps(bits);
}
inline V round_to_whole(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V min(V a, V b) { return _mm256_min_ps(a, b); }

inline __m256i bf16_bits(V x) {  // in the low halves of 32-bit lanes
    __m256i bits = _mm256_castps_si256(x);
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i nan = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
    return _mm256_srli_epi32(_mm256_blendv_epi8(up, nan, is_nan), 16);
}
inline void store_bf16(uint16_t *p, V x) {
    __m256i bits = bf16_bits(x);
    __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(p), halves);
}
inline void store_bf16_n(uint16_t *p, V x, int n) {
    alignas(16) uint16_t all[8];
    store_bf16(all, x);
    for (int i = 0; i < n; ++i) p[i] = all[i];
}

// Store 64 values as whole numbers, of every four 0, 2, 1, 3, and return their sum.
inline int32_t store_s16(int16_t *p, const float *x) {
    __m256i total = _mm256_setzero_si256();
    for (int i = 0; i < 64; i += 8) {
        __m256i whole = _mm256_cvtps_epi32(_mm256_loadu_ps(x + i));
        total = _mm256_add_epi32(total, whole);
        __m128i halves = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
        halves = _mm_shufflehi_epi16(_mm_shufflelo_epi16(halves, 0xd8), 0xd8);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p + i), halves);
    }
    alignas(32) int32_t parts[8];
    _mm256_store_si256(reinterpret_cast<__m256i *>(parts), total);
    int32_t sum = 0;
    for (int i = 0; i < 8; ++i) sum += parts[i];
    return sum;
}
inline int32_t store_s8(int8_t *, const float *) { return 0; }  // this path multiplies no int8

}  // namespace
}  // namespace sakiyomi

#include "exp.h"
