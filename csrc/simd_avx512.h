// Sixteen floats at a time.
#pragma once

#include <immintrin.h>

#include <stdint.h>

namespace sakiyomi {
namespace {

using V = __m512;
constexpr int W = 16;

inline __mmask16 lanes(int n) { return static_cast<__mmask16>((1u << n) - 1); }
inline V load(const float *p) { return _mm512_loadu_ps(p); }
inline V load_n(const float *p, int n) { return _mm512_maskz_loadu_ps(lanes(n), p); }
inline void store(float *p, V x) { _mm512_storeu_ps(p, x); }
inline void store_n(float *p, V x, int n) { _mm512_mask_storeu_ps(p, lanes(n), x); }
inline V set1(float x) { return _mm512_set1_ps(x); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }  // b where either isn't a number
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline V abs(V a) { return _mm512_abs_ps(a); }
inline float sum(V x) { return _mm512_reduce_add_ps(x); }
inline float highest(V x) { return _mm512_reduce_max_ps(x); }

inline V power_of_2(V n) {  // of whole numbers in -127..127; 2^-127 is 0
    __m512i bits = _mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23);
    return _mm512_castsi512_ps(bits);
}
inline V round_to_whole(V x) { return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

inline __m256i to_bf16(V x) {
#if SAKIYOMI_LEVEL >= SAKIYOMI_AVX512_BF16
    return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x));
#else
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    up = _mm512_mask_or_epi32(up, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
}
inline void store_bf16(uint16_t *p, V x) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(p), to_bf16(x)); }
inline void store_bf16_n(uint16_t *p, V x, int n) { _mm256_mask_storeu_epi16(p, lanes(n), to_bf16(x)); }

// Store 64 values as whole numbers and return their sum.
inline int32_t store_s8(int8_t *p, const float *x) {
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < 64; i += 16) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_loadu_ps(x + i));
        total = _mm512_add_epi32(total, whole);
        _mm_storeu_si128(reinterpret_cast<__m128i *>(p + i), _mm512_cvtepi32_epi8(whole));
    }
    return _mm512_reduce_add_epi32(total);
}
// The same, of every four: 0, 2, 1, 3.
inline int32_t store_s16(int16_t *p, const float *x) {
    __m512i total = _mm512_setzero_si512();
    for (int i = 0; i < 64; i += 16) {
        __m512i whole = _mm512_cvtps_epi32(_mm512_loadu_ps(x + i));
        total = _mm512_add_epi32(total, whole);
        __m256i halves = _mm512_cvtepi32_epi16(whole);
        halves = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(halves, 0xd8), 0xd8);
        _mm256_storeu_si256(reinterpret_cast<__m256i *>(p + i), halves);
    }
    return _mm512_reduce_add_epi32(total);
}

}  // namespace
}  // namespace sakiyomi

#include "exp.h"
