// The copy kernel's body and arguments. Compiles as plain C++ too: tests run it without a GPU, under sanitizers.
//
// Rows are cut into pieces that a warp has in flight at once. The accesses are made to leave the caches to the model:
// nothing is allocated in L1, and what passes through L2 leaves it first.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define KVSWAP_HOST_DEVICE __host__ __device__
#else
#define KVSWAP_HOST_DEVICE
#endif
#ifdef __CUDA_ARCH__
#define KVSWAP_UNROLL _Pragma("unroll")
#else
#define KVSWAP_UNROLL
#endif

namespace kvswap::cuda {

constexpr int kKernelAbi = 3;  // raised with every change of KernelArguments or of the launch
constexpr int kKernelEntries = 8;
constexpr int kKernelRuns = 300;
constexpr int kLanes = 32;
constexpr int kLoads = 8;  // of each lane, in flight
constexpr int kVectorBytes = 16;

struct KernelEntry {
  uint64_t target, source;
  int64_t target_pitch, source_pitch;
  int64_t units;   // per row
  int32_t unit;    // bytes of one access: 16, or less where the rows are not on such borders
  int32_t pieces;  // per row, of kLanes * kLoads units, the last may be shorter
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

// Who I am among how many: warps share the pieces, the lanes of a warp share a piece's units.
struct KernelIndex {
  int32_t warp, warps;
  int32_t lane;
};

#ifdef __CUDA_ARCH__
__device__ inline uint64_t first_to_leave() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline Vector load(const Vector* from) {
  Vector value;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(from), "l"(first_to_leave()));
  return value;
}
__device__ inline void store(Vector* to, const Vector& value) {
  asm volatile("st.global.L1::no_allocate.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to),
               "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3]), "l"(first_to_leave())
               : "memory");
}
template <typename Unit>
__device__ Unit load(const Unit* from) {
  return __ldcs(from);
}
template <typename Unit>
__device__ void store(Unit* to, const Unit& value) {
  __stcs(to, value);
}
#else
template <typename Unit>
KVSWAP_HOST_DEVICE Unit load(const Unit* from) {
  return *from;
}
template <typename Unit>
KVSWAP_HOST_DEVICE void store(Unit* to, const Unit& value) {
  *to = value;
}
#endif

// One lane's part of the piece that starts at unit `first` of a row.
template <typename Unit>
KVSWAP_HOST_DEVICE inline void copy_piece(uint64_t target, uint64_t source, int64_t first, int64_t units, int lane) {
  auto* to = reinterpret_cast<Unit*>(target) + first;
  const auto* of = reinterpret_cast<const Unit*>(source) + first;
  const int64_t left = units - first;
  if (left >= kLanes * kLoads) {
    Unit loaded[kLoads];
    KVSWAP_UNROLL
    for (int i = 0; i < kLoads; ++i) loaded[i] = load(of + lane + i * kLanes);
    KVSWAP_UNROLL
    for (int i = 0; i < kLoads; ++i) store(to + lane + i * kLanes, loaded[i]);
  } else {
    for (int64_t i = lane; i < left; i += kLanes) store(to + i, load(of + i));
  }
}

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

KVSWAP_HOST_DEVICE inline void copy_piece_of_entry(const KernelArguments& arguments, const KernelEntry& entry,
                                                   int64_t number, int lane) {
  const auto block = static_cast<int32_t>(number / entry.pieces);
  const int64_t first = number % entry.pieces * (kLanes * kLoads);
  const KernelRun& run = arguments.run[run_of_block(arguments, block)];
  const int64_t offset = block - run.first;
  const uint64_t target = entry.target + static_cast<uint64_t>((run.target + offset) * entry.target_pitch);
  const uint64_t source = entry.source + static_cast<uint64_t>((run.source + offset) * entry.source_pitch);
  switch (entry.unit) {
    case 16:
      return copy_piece<Vector>(target, source, first, entry.units, lane);
    case 8:
      return copy_piece<unsigned long long>(target, source, first, entry.units, lane);
    case 4:
      return copy_piece<unsigned int>(target, source, first, entry.units, lane);
    case 2:
      return copy_piece<unsigned short>(target, source, first, entry.units, lane);
    default:
      return copy_piece<unsigned char>(target, source, first, entry.units, lane);
  }
}

KVSWAP_HOST_DEVICE inline void copy_rows(const KernelArguments& arguments, const KernelIndex& index) {
  int64_t first = 0;  // piece of this entry, among those of all entries
  int64_t number = index.warp;
  for (int i = 0; i < arguments.entries; ++i) {
    const KernelEntry& entry = arguments.entry[i];
    const int64_t end = first + int64_t{arguments.blocks} * entry.pieces;
    for (; number < end; number += index.warps) copy_piece_of_entry(arguments, entry, number - first, index.lane);
    first = end;
  }
}

// 4 KB per warp in flight, 256 KB in all, is more than PCIe 5 holds; eight multiprocessors at most are busy with it.
constexpr int kKernelGroups = 8;
constexpr int kKernelWarps = 8;  // per group

// Enqueues on the stream; returns a cudaError_t.
using KernelLaunch = int (*)(const KernelArguments* arguments, int groups, int threads, void* stream);

}  // namespace kvswap::cuda
