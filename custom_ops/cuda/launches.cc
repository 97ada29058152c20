// Cuts a copy into kernel launches whose arguments fit the parameter space.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>

#include "paths.h"

namespace kvswap::cuda {
namespace {

constexpr int64_t kMost = INT32_MAX / kKernelEntries;  // rows and blocks of one launch stay 32 bits wide

bool is_aligned(const kvswap_rows& rows) {
  return rows.address % kVectorBytes == 0 && rows.pitch % kVectorBytes == 0 && rows.row_bytes % kVectorBytes == 0;
}

void launch_runs(KernelLaunch launch, KernelArguments& arguments, Stream stream) {
  if (arguments.runs == 0) return;
  const int64_t rows = static_cast<int64_t>(arguments.blocks) * arguments.entries;
  const int result =
      launch(&arguments, static_cast<int>(std::min<int64_t>(rows, kKernelGroups)), kKernelThreads, stream);
  if (result != kSuccess) throw Error(KVSWAP_DRIVER, format("the copy kernel: CUDA error %d", result));
  arguments.runs = arguments.blocks = 0;
}

void launch_entries(KernelLaunch launch, KernelArguments& arguments, const Plan& plan, Stream stream) {
  for (const auto& run : plan.runs) {
    if (arguments.runs == kKernelRuns || arguments.blocks + run.blocks > kMost) {
      launch_runs(launch, arguments, stream);
    }
    arguments.run[arguments.runs++] = {static_cast<int32_t>(run.source), static_cast<int32_t>(run.target),
                                       arguments.blocks};
    arguments.blocks += static_cast<int32_t>(run.blocks);
  }
  launch_runs(launch, arguments, stream);
}

// _core_cuda.so lies beside the library this function is in.
KernelLaunch load() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&fits_kernel), &info) == 0 || info.dli_fname == nullptr) return nullptr;
  const std::string self = info.dli_fname;
  const std::string path = self.substr(0, self.find_last_of('/') + 1) + "_core_cuda.so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  return library == nullptr ? nullptr : reinterpret_cast<KernelLaunch>(dlsym(library, "kvswap_kernel_launch"));
}

}  // namespace

KernelLaunch kernel_launch() {
  static const KernelLaunch loaded = load();
  return loaded;
}

bool fits_kernel(const Entries& entries, const Plan& plan) {
  return plan.source_end <= kMost && plan.target_end <= kMost &&
         std::all_of(entries.begin(), entries.end(),
                     [](const Entry& entry) { return is_aligned(entry.target) && is_aligned(entry.source); });
}

void copy_by_kernel(KernelLaunch launch, const Entries& entries, const Plan& plan, Stream stream) {
  for (size_t first = 0; first < entries.size(); first += kKernelEntries) {
    KernelArguments arguments{};
    for (size_t i = first; i < std::min(entries.size(), first + kKernelEntries); ++i) {
      const Entry& entry = entries[i];
      arguments.entry[arguments.entries++] = {entry.target.address, entry.source.address, entry.target.pitch,
                                              entry.source.pitch, entry.row_bytes() / kVectorBytes};
    }
    launch_entries(launch, arguments, plan, stream);
  }
}

}  // namespace kvswap::cuda
