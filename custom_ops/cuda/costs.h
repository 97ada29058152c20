// What a copy would cost on each path, and so which one AUTO takes.
#pragma once

#include "paths.h"

namespace kvswap::cuda {

// A submission makes no more driver calls by RUNS or STAGED where another path can do the copy: a stream holds about
// as many, and the thread that submits more waits for the GPU.
constexpr int64_t kMostCalls = 1024;

kvswap_costs costs_of(bool to_device);
// Throws KVSWAP_INVALID for a number that is not positive.
void set_costs(bool to_device, const kvswap_costs& costs);

int allowed_paths();
void allow_paths(int paths);
void forbid_path(int path);

// Infinite cost where `path` cannot do the copy.
kvswap_estimate estimate(const Copy& copy, int path);
// What AUTO takes: the cheapest of the allowed paths, RUNS where none of them can.
int choose_path(const Copy& copy);

}  // namespace kvswap::cuda
