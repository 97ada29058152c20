// Cuts a copy into kernel launches whose arguments fit the parameter space.
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>

#include "paths.h"

namespace kvswap::cuda {
namespace {

constexpr int64_t kMost = INT32_MAX;  // slots, and blocks of one launch, are 32 bits wide

KernelEntry kernel_entry(const Entry& entry) {
  const int unit = access_bytes(entry);
  const int64_t units = entry.row_bytes() / unit, pieces = (units + kLanes * kLoads - 1) / (kLanes * kLoads);
  return {entry.target.address,        entry.source.address, entry.target.pitch, entry.source.pitch, units, unit,
          static_cast<int32_t>(pieces)};
}

// What cudart says at the launch, before anything runs: built for other GPUs, or for a newer driver (34, 35, 36, 803,
// 804: driver; 98, 200, 209: no code for this GPU; 218, 221, 222, 223: cannot compile the portable code).
bool is_unusable(int result) {
  constexpr int kResults[] = {34, 35, 36, 98, 200, 209, 218, 221, 222, 223, 803, 804};
  return std::find(std::begin(kResults), std::end(kResults), result) != std::end(kResults);
}

struct UnusableKernel {};

std::atomic<int> refused_with{0};

void launch_runs(const Copy& copy, KernelArguments& arguments) {
  if (arguments.runs == 0) return;
  int64_t pieces = 0;
  for (int i = 0; i < arguments.entries; ++i) pieces += int64_t{arguments.blocks} * arguments.entry[i].pieces;
  const auto groups = std::min<int64_t>((pieces + kKernelWarps - 1) / kKernelWarps, kKernelGroups);
  const int result = copy.launch(&arguments, static_cast<int>(groups), kKernelWarps * kLanes, copy.stream);
  if (is_unusable(result)) {
    refused_with = result;
    throw UnusableKernel{};
  }
  check(copy.driver, result, "the copy kernel");
  arguments.runs = arguments.blocks = 0;
}

void launch_entries(const Copy& copy, KernelArguments& arguments) {
  for (const auto& run : copy.plan.runs) {
    if (arguments.runs == kKernelRuns || arguments.blocks + run.blocks > kMost) launch_runs(copy, arguments);
    arguments.run[arguments.runs++] = {static_cast<int32_t>(run.source), static_cast<int32_t>(run.target),
                                       arguments.blocks};
    arguments.blocks += static_cast<int32_t>(run.blocks);
  }
  launch_runs(copy, arguments);
}

// _core_cuda.so lies beside the library this function is in.
KernelLaunch load() {
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(&kernel_launch), &info) == 0 || info.dli_fname == nullptr) return nullptr;
  const std::string self = info.dli_fname;
  const std::string path = self.substr(0, self.find_last_of('/') + 1) + "_core_cuda.so";
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return nullptr;
  const auto abi = reinterpret_cast<int (*)()>(dlsym(library, "kvswap_kernel_abi"));
  if (abi == nullptr || abi() != kKernelAbi) return nullptr;
  return reinterpret_cast<KernelLaunch>(dlsym(library, "kvswap_kernel_launch"));
}

}  // namespace

KernelLaunch kernel_launch() {
  static const KernelLaunch loaded = load();
  return loaded;
}

int kernel_refusal() { return refused_with; }

int access_bytes(const Entry& entry) {
  const auto all = entry.target.address | entry.source.address | static_cast<uint64_t>(entry.row_bytes()) |
                   static_cast<uint64_t>(entry.target.pitch) | static_cast<uint64_t>(entry.source.pitch);
  int bytes = kVectorBytes;
  while (all % static_cast<uint64_t>(bytes) != 0) bytes /= 2;
  return bytes;
}

bool fits_kernel(const Copy& copy) {
  const bool is_narrow = std::all_of(copy.entries.begin(), copy.entries.end(), [](const Entry& entry) {
    return entry.row_bytes() <= INT32_MAX;  // and so is the number of its pieces
  });
  return copy.launch != nullptr && copy.is_page_locked && is_narrow && copy.plan.source_end <= kMost &&
         copy.plan.target_end <= kMost;
}

bool copy_by_kernel(const Copy& copy) {
  for (size_t first = 0; first < copy.entries.size(); first += kKernelEntries) {
    KernelArguments arguments{};
    for (size_t i = first; i < std::min(copy.entries.size(), first + kKernelEntries); ++i) {
      arguments.entry[arguments.entries++] = kernel_entry(copy.entries[i]);
    }
    try {
      launch_entries(copy, arguments);
    } catch (const UnusableKernel&) {
      return false;  // nothing was submitted: no launch before this one can have worked
    }
  }
  return true;
}

}  // namespace kvswap::cuda
