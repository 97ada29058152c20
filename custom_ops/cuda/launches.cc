// Cuts a copy into kernel launches whose arguments fit the parameter space.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <iterator>

#include "paths.h"

namespace kvswap::cuda {
namespace {

constexpr int64_t kMost = INT32_MAX / kKernelEntries;  // rows and blocks of one launch stay 32 bits wide

bool is_aligned(const kvswap_rows& rows) {
  return rows.address % kVectorBytes == 0 && rows.pitch % kVectorBytes == 0 && rows.row_bytes % kVectorBytes == 0;
}

// What cudart says at the launch, before anything runs: built for other GPUs, or for a newer driver (34, 35, 36:
// driver; 98, 200, 209: no code for this GPU; 221, 222, 223: cannot compile the portable code).
bool is_unusable(int result) {
  constexpr int kResults[] = {34, 35, 36, 98, 200, 209, 221, 222, 223};
  return std::find(std::begin(kResults), std::end(kResults), result) != std::end(kResults);
}

struct UnusableKernel {};

void launch_runs(KernelLaunch launch, KernelArguments& arguments, Stream stream) {
  if (arguments.runs == 0) return;
  const int64_t rows = static_cast<int64_t>(arguments.blocks) * arguments.entries;
  const int result =
      launch(&arguments, static_cast<int>(std::min<int64_t>(rows, kKernelGroups)), kKernelThreads, stream);
  if (is_unusable(result)) throw UnusableKernel{};
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
  if (library == nullptr) return nullptr;
  const auto abi = reinterpret_cast<int (*)()>(dlsym(library, "kvswap_kernel_abi"));
  if (abi == nullptr || abi() != kKernelAbi) return nullptr;
  return reinterpret_cast<KernelLaunch>(dlsym(library, "kvswap_kernel_launch"));
}

// Kernels may know page-locked memory by another address than the host does. False where they cannot reach it: a
// kernel that tried would take the whole CUDA context with it.
bool find_for_kernels(const Driver& driver, uint64_t& host_address) {
  DevicePointer found = 0;
  if (driver.pointer_attribute(&found, kDevicePointerAttribute, host_address) != kSuccess || found == 0) return false;
  host_address = found;
  return true;
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

bool copy_by_kernel(const Driver& driver, KernelLaunch launch, const Entries& host_entries, const Plan& plan,
                    bool to_device, Stream stream) {
  Entries entries = host_entries;
  for (auto& entry : entries) {
    if (!find_for_kernels(driver, to_device ? entry.source.address : entry.target.address)) return false;
  }
  if (!fits_kernel(entries, plan)) return false;
  for (size_t first = 0; first < entries.size(); first += kKernelEntries) {
    KernelArguments arguments{};
    for (size_t i = first; i < std::min(entries.size(), first + kKernelEntries); ++i) {
      const Entry& entry = entries[i];
      arguments.entry[arguments.entries++] = {entry.target.address, entry.source.address, entry.target.pitch,
                                              entry.source.pitch, entry.row_bytes() / kVectorBytes};
    }
    try {
      launch_entries(launch, arguments, plan, stream);
    } catch (const UnusableKernel&) {
      return false;  // nothing was submitted: no launch before this one can have worked
    }
  }
  return true;
}

}  // namespace kvswap::cuda
