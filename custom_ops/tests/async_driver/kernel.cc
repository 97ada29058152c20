// A _core_cuda.so for the fake GPU: the copy kernel's own body, on the CPU, its groups in any order.
#include "../../cuda/kernel.h"

#include <dlfcn.h>

#include <memory>

using namespace kvswap::cuda;

namespace {

struct Launch {
  KernelArguments arguments;
  int groups, threads;
};

using Resolve = void* (*)(uint64_t, uint64_t);
using Submit = int (*)(uint64_t, int (*)(void*, uint64_t), void*, uint64_t, int);

template <typename Function>
Function of_the_driver(const char* name) {
  static void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function>(dlsym(library, name));
}

// Every row has to be memory that a kernel can reach; then the first one stands for all.
bool translate(uint64_t& address, int64_t pitch, int64_t width, int32_t KernelRun::* slot, const KernelArguments& all) {
  static const auto resolve = of_the_driver<Resolve>("fake_resolve");
  uint64_t base = 0;
  for (int run = 0; run < all.runs; ++run) {
    const int32_t end = run + 1 < all.runs ? all.run[run + 1].first : all.blocks;
    for (int64_t row = all.run[run].*slot; row < all.run[run].*slot + (end - all.run[run].first); ++row) {
      const uint64_t there = address + static_cast<uint64_t>(row * pitch);
      void* here = resolve(there, static_cast<uint64_t>(width));
      if (here == nullptr) return false;
      base = reinterpret_cast<uint64_t>(here) - static_cast<uint64_t>(row * pitch);
    }
  }
  address = base;
  return true;
}

int run_group(void* context, uint64_t group) {
  const auto& launch = *static_cast<Launch*>(context);
  KernelArguments here = launch.arguments;
  for (int i = 0; i < here.entries; ++i) {
    auto& entry = here.entry[i];
    const int64_t width = entry.units * entry.unit;
    if (!translate(entry.target, entry.target_pitch, width, &KernelRun::target, here) ||
        !translate(entry.source, entry.source_pitch, width, &KernelRun::source, here)) {
      return 700;
    }
  }
  const int warps = launch.threads / kLanes;
  for (int thread = launch.threads; thread-- > 0;) {
    const auto warp = static_cast<int32_t>(group) * warps + thread / kLanes;
    copy_rows(here, {warp, launch.groups * warps, thread % kLanes});
  }
  return 0;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int kvswap_kernel_abi() { return kKernelAbi; }

extern "C" __attribute__((visibility("default"))) int kvswap_kernel_launch(const KernelArguments* arguments, int groups,
                                                                           int threads, void* stream) {
  auto* launch = new Launch{*arguments, groups, threads};  // kept: a graph may run it again
  return of_the_driver<Submit>("fake_launch")(reinterpret_cast<uint64_t>(stream), run_group, launch,
                                              static_cast<uint64_t>(groups), 0);
}
