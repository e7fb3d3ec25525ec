// The path "amx".
#define SAKIYOMI_PATH "amx"
#define SAKIYOMI_LEVEL SAKIYOMI_AMX
#include "levels.h"
#include "simd_avx512.h"

#include "kernels.inl"

namespace sakiyomi {

const Kernels *amx_kernels() { return &TABLE; }

}  // namespace sakiyomi
