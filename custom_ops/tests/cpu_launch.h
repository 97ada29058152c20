// The copy kernel on the CPU, for tests.
#pragma once

#include "../cuda/paths.h"
#include "expect.h"

constexpr uint64_t kStream = 0x1000;
constexpr int kAll = 1 << KVSWAP_PATH_RUNS | 1 << KVSWAP_PATH_BATCH | 1 << KVSWAP_PATH_KERNEL | 1 << KVSWAP_PATH_STAGED;

inline int launches = 0;

// A GPU would run the warps and lanes in any order: so forwards and backwards.
inline int launch_on_cpu(const kvswap::cuda::KernelArguments* arguments, int groups, int threads, void* stream) {
  using namespace kvswap::cuda;
  EXPECT(reinterpret_cast<uint64_t>(stream) == kStream);
  EXPECT(groups >= 1 && groups <= kKernelGroups && threads == kKernelWarps * kLanes);
  const int warps = groups * kKernelWarps;
  const bool backwards = ++launches % 2 == 0;
  for (int i = 0; i < warps; ++i) {
    for (int j = 0; j < kLanes; ++j) {
      copy_rows(*arguments, {backwards ? warps - 1 - i : i, warps, backwards ? kLanes - 1 - j : j});
    }
  }
  return kSuccess;
}

inline kvswap::cuda::Copy copy_of(kvswap::cuda::KernelLaunch launch, const kvswap::Entries& entries,
                                  const kvswap::Plan& plan, bool to_device) {
  return make_copy(kvswap::cuda::driver(), launch, entries, plan, to_device, reinterpret_cast<void*>(kStream));
}
