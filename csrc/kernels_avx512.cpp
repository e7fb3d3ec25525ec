// The path "avx512".
#define SAKIYOMI_PATH "avx512"
#define SAKIYOMI_LEVEL SAKIYOMI_AVX512
#include "levels.h"
#include "simd_avx512.h"

#include "kernels.inl"

namespace sakiyomi {

const Kernels *avx512_kernels() { return &TABLE; }

}  // namespace sakiyomi
