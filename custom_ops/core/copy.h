// CPU copies on the calling thread.
#pragma once

#include "plan.h"

namespace kvswap {

// Throws for a path that is not a CPU path.
void check_cpu_path(int path);
// Everything has been checked. Target bytes are visible to whoever synchronizes with this thread afterwards.
void copy_entries(const Entries& entries, const Plan& plan, int path) noexcept;

}  // namespace kvswap
