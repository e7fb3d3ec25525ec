// Which instruction paths this processor, and this build, can run.
#pragma once

#include <vector>

#include "kernels.h"

namespace sakiyomi {

const std::vector<const Kernels *> &paths();  // fastest first; the last one runs everywhere
const Kernels *path(const char *name);        // null: unknown or not here

}  // namespace sakiyomi
