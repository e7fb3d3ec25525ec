// The paths in order: each has the instructions of those before it. What a file may use is said by SAKIYOMI_LEVEL, not
// by the compiler's own macros, which follow flags that a user may have set for everything.
#pragma once

#define SAKIYOMI_PLAIN 0
#define SAKIYOMI_AVX2 1
#define SAKIYOMI_AVX512 2
#define SAKIYOMI_AVX512_BF16 3
#define SAKIYOMI_AMX 4
