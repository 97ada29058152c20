// The copy kernel's body and arguments. Compiles as plain C++ too: tests run it without a GPU, under sanitizers.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVSWAP_HOST_DEVICE __host__ __device__
#else
#define KVSWAP_HOST_DEVICE
#endif

namespace kvswap::cuda {

constexpr int kKernelEntries = 8;
constexpr int kKernelRuns = 192;
constexpr int kVectorBytes = 16;

struct KernelEntry {
  uint64_t target, source;
  int64_t target_pitch, source_pitch;
  int64_t vectors;  // of 16 bytes, per row
};

struct KernelRun {
  int32_t source, target;
  int32_t first;  // how many blocks the runs before this one have
};

// By value in the kernel's parameters, which hold 4 KB on every GPU: nothing to stage, nothing to keep alive.
struct KernelArguments {
  int32_t entries, runs;
  int32_t blocks;  // of all runs
  KernelEntry entry[kKernelEntries];
  KernelRun run[kKernelRuns];
};
static_assert(sizeof(KernelArguments) <= 4096, "kernel parameters are limited to 4 KB");

struct alignas(kVectorBytes) Vector {
  uint32_t word[4];
};

// Who I am among how many: groups share the rows, the threads of a group share a row's vectors.
struct KernelIndex {
  int32_t group, groups;
  int32_t thread, threads;
};

// The run that block number `block` of all runs belongs to.
KVSWAP_HOST_DEVICE inline int run_of_block(const KernelArguments& arguments, int32_t block) {
  int low = 0, high = arguments.runs - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (arguments.run[middle].first <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

KVSWAP_HOST_DEVICE inline void copy_rows(const KernelArguments& arguments, const KernelIndex& index) {
  constexpr int kUnroll = 4;  // loads in flight per thread
  const int64_t rows = static_cast<int64_t>(arguments.blocks) * arguments.entries;
  for (int64_t row = index.group; row < rows; row += index.groups) {
    const KernelEntry& entry = arguments.entry[row / arguments.blocks];
    const auto block = static_cast<int32_t>(row % arguments.blocks);
    const KernelRun& run = arguments.run[run_of_block(arguments, block)];
    const int64_t offset = block - run.first;
    auto* to = reinterpret_cast<Vector*>(entry.target + (run.target + offset) * entry.target_pitch);
    const auto* of = reinterpret_cast<const Vector*>(entry.source + (run.source + offset) * entry.source_pitch);
    int64_t i = index.thread;
    for (; i + (kUnroll - 1) * index.threads < entry.vectors; i += kUnroll * index.threads) {
      Vector loaded[kUnroll];
      for (int u = 0; u < kUnroll; ++u) loaded[u] = of[i + u * index.threads];
      for (int u = 0; u < kUnroll; ++u) to[i + u * index.threads] = loaded[u];
    }
    for (; i < entry.vectors; i += index.threads) to[i] = of[i];
  }
}

// Few groups: over PCIe a handful of them fill the link, and the other multiprocessors stay with the forward pass.
constexpr int kKernelGroups = 32;
constexpr int kKernelThreads = 256;

// Enqueues on the stream; returns a cudaError_t.
using KernelLaunch = int (*)(const KernelArguments* arguments, int groups, int threads, void* stream);

}  // namespace kvswap::cuda
