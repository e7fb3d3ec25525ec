// The path "avx512_bf16".
#define SAKIYOMI_PATH "avx512_bf16"
#define SAKIYOMI_LEVEL SAKIYOMI_AVX512_BF16
#include "levels.h"
#include "simd_avx512.h"

#include "kernels.inl"

namespace sakiyomi {

const Kernels *avx512_bf16_kernels() { return &TABLE; }

}  // namespace sakiyomi
