// The copy kernel: rows of cache blocks between device tensors and page-locked, block-major host memory. Bytes only.
//
// `rows` says where each role of each layer keeps its blocks on either side; it is uploaded once. `spans` is the plan
// of one copy, uploaded once however many layers use it. A launch copies the rows [first_row, end_row) of all its
// blocks. Rows are cut into pieces that a warp has in flight at once. Accesses leave the caches to the model: nothing
// is allocated in L1, and what passes through L2 leaves it first.
//
// Its PTX travels with the package (`custom_ops/build.py ptx` renews it), Paddle's operators (paddle_ops.cu) launch it
// from here, and as plain C++ it runs on a CPU, for tests.
#include <cstdint>

#ifdef __CUDACC__
#define KVCACHE_BOTH __host__ __device__
#else
#define KVCACHE_BOTH
#endif

namespace kvcache {

// Same layouts in fastdeploy_kvcache_v1/worker/cuda/copies.py.
struct Row {
  uint64_t device, host;
  int64_t device_pitch, host_pitch;
  int32_t bytes;
  int32_t unit;  // bytes of one access: 16, or less where the row is not on such borders
};
struct Span {
  int32_t source, target;  // slots of its first block
  int32_t first;           // blocks of the spans before
};
struct Copy {
  const Row* rows;
  const Span* spans;
  int32_t first_row, end_row;
  int32_t num_spans, num_blocks;
  int32_t to_device;
};
struct alignas(16) Vector {
  uint32_t word[4];
};

constexpr int kLanes = 32, kLoads = 8;  // a warp, and loads in flight of each lane
constexpr int kThreads = 1024;          // of a group, at most

#ifdef __CUDA_ARCH__
__device__ inline uint64_t leaves_first() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ inline Vector load(const Vector* from) {
  Vector value;
  asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(value.word[0]), "=r"(value.word[1]), "=r"(value.word[2]), "=r"(value.word[3])
               : "l"(from), "l"(leaves_first()));
  return value;
}
__device__ inline void store(Vector* to, const Vector& value) {
  asm volatile("st.global.L1::no_allocate.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to),
               "r"(value.word[0]), "r"(value.word[1]), "r"(value.word[2]), "r"(value.word[3]), "l"(leaves_first())
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
KVCACHE_BOTH Unit load(const Unit* from) {
  return *from;
}
template <typename Unit>
KVCACHE_BOTH void store(Unit* to, const Unit& value) {
  *to = value;
}
#endif

// One lane's part of a piece of a row.
template <typename Unit>
KVCACHE_BOTH void copy_piece(char* target, const char* source, int64_t piece, int32_t row_bytes, int lane) {
  const int64_t first = piece * kLanes * kLoads, left = row_bytes / int64_t{sizeof(Unit)} - first;
  Unit* to = reinterpret_cast<Unit*>(target) + first;
  const Unit* of = reinterpret_cast<const Unit*>(source) + first;
  if (left >= kLanes * kLoads) {
    Unit loaded[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) loaded[i] = load(of + lane + i * kLanes);
#pragma unroll
    for (int i = 0; i < kLoads; ++i) store(to + lane + i * kLanes, loaded[i]);
  } else {
    for (int64_t i = lane; i < left; i += kLanes) store(to + i, load(of + i));
  }
}

// The span that has the copy's block number `block`.
KVCACHE_BOTH inline const Span& span_of(const Copy& copy, int32_t block) {
  int low = 0, high = copy.num_spans - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (copy.spans[middle].first <= block) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return copy.spans[low];
}

KVCACHE_BOTH inline void copy_piece_of_block(const Copy& copy, const Row& row, int32_t block, int64_t piece, int lane) {
  const Span& span = span_of(copy, block);
  const int64_t source = span.source + (block - span.first), target = span.target + (block - span.first);
  char* device = reinterpret_cast<char*>(row.device) + (copy.to_device ? target : source) * row.device_pitch;
  char* host = reinterpret_cast<char*>(row.host) + (copy.to_device ? source : target) * row.host_pitch;
  char* to = copy.to_device ? device : host;
  const char* of = copy.to_device ? host : device;
  switch (row.unit) {
    case 16:
      return copy_piece<Vector>(to, of, piece, row.bytes, lane);
    case 4:
      return copy_piece<uint32_t>(to, of, piece, row.bytes, lane);
    default:
      return copy_piece<unsigned char>(to, of, piece, row.bytes, lane);
  }
}

// What warp number `warp` of `warps` does.
KVCACHE_BOTH inline void copy_rows(const Copy& copy, int64_t warp, int64_t warps, int lane) {
  int64_t begin = 0, number = warp;  // pieces of the rows before this one; the next piece of this warp
  for (int i = copy.first_row; i < copy.end_row; ++i) {
    const Row row = copy.rows[i];
    const int64_t units = row.bytes / row.unit, pieces = (units + kLanes * kLoads - 1) / (kLanes * kLoads);
    const int64_t end = begin + pieces * copy.num_blocks;
    for (; number < end; number += warps) {
      const int64_t at = number - begin;
      copy_piece_of_block(copy, row, static_cast<int32_t>(at / pieces), at % pieces, lane);
    }
    begin = end;
  }
}

}  // namespace kvcache

#ifdef __CUDACC__
extern "C" __global__ void __launch_bounds__(kvcache::kThreads)
    copy_cache_rows(const __grid_constant__ kvcache::Copy copy) {
  const int lane = threadIdx.x % kvcache::kLanes, warps = blockDim.x / kvcache::kLanes;
  kvcache::copy_rows(copy, int64_t{blockIdx.x} * warps + threadIdx.x / kvcache::kLanes, int64_t{gridDim.x} * warps,
                     lane);
}
#else
// Every warp and lane in turn, the last one first.
extern "C" void copy_cache_rows(const kvcache::Copy* copy, int warps) {
  for (int warp = warps - 1; warp >= 0; --warp) {
    for (int lane = kvcache::kLanes - 1; lane >= 0; --lane) kvcache::copy_rows(*copy, warp, warps, lane);
  }
}
#endif
