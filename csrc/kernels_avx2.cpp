// The path "avx2".
#define SAKIYOMI_PATH "avx2"
#define SAKIYOMI_LEVEL SAKIYOMI_AVX2
#include "levels.h"
#include "simd_avx2.h"

#include "kernels.inl"

namespace sakiyomi {

const Kernels *avx2_kernels() { return &TABLE; }

}  // namespace sakiyomi
