// The path "plain".
#define SAKIYOMI_PATH "plain"
#define SAKIYOMI_LEVEL SAKIYOMI_PLAIN
#include "levels.h"
#include "simd_plain.h"

#include "kernels.inl"

namespace sakiyomi {

const Kernels *plain_kernels() { return &TABLE; }

}  // namespace sakiyomi
