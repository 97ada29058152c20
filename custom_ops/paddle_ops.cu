// FastDeploy's swap operators for Paddle: blocks between cache tensors and dense host buffers, by the kernel of
// copy_rows.cu on a GPU, by memcpy on a CPU. Bytes only, so every dtype works.
// Docs: fastdeploy_kvcache_v1/worker/ops/paddle_ops.py
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "copy_rows.cu"
#include "paddle/phi/api/ext/op_meta_info.h"

#ifndef KVCACHE_PADDLE
#define KVCACHE_PADDLE ""
#endif

namespace {

using paddle::Tensor;
using Ids = std::vector<int64_t>;

enum Mode { kToHost = 0, kToDevice = 1 };

struct Plan {
  std::vector<kvcache::Row> rows;  // of each cache tensor
  std::vector<kvcache::Span> spans;
  int32_t num_blocks;
  bool to_device;
};

void check_ids(const char* name, const Ids& ids, int64_t num_blocks) {
  PD_CHECK(num_blocks <= std::numeric_limits<int32_t>::max(), "too many blocks for ", name, ": ", num_blocks);
  for (const int64_t id : ids) {
    PD_CHECK(id >= 0 && id < num_blocks, name, " must be in [0, ", num_blocks, "), got ", id);
  }
}

void check_written_once(Ids targets) {
  std::sort(targets.begin(), targets.end());
  const auto twice = std::adjacent_find(targets.begin(), targets.end());
  PD_CHECK(twice == targets.end(), "block ", *twice, " is written twice");
}

kvcache::Row row_of(const Tensor& cache, int64_t host, bool on_gpu) {
  PD_CHECK(cache.initialized() && cache.numel() > 0 && !cache.shape().empty(), "a cache tensor is empty");
  PD_CHECK(on_gpu ? cache.is_gpu() : cache.is_cpu(), "cache tensors must all be on the GPU or all on the CPU");
  PD_CHECK(host > 0, "a swap needs the address of the host memory");
  const int64_t bytes = cache.numel() / cache.shape()[0] * static_cast<int64_t>(phi::SizeOf(cache.dtype()));
  PD_CHECK(bytes <= std::numeric_limits<int32_t>::max(), "a block of a cache tensor has 2 GiB or more");
  const auto device = reinterpret_cast<uint64_t>(cache.data());
  const uint64_t borders = device | static_cast<uint64_t>(host) | static_cast<uint64_t>(bytes);
  const int32_t unit = borders % 16 == 0 ? 16 : borders % 4 == 0 ? 4 : 1;
  return {device, static_cast<uint64_t>(host), bytes, bytes, static_cast<int32_t>(bytes), unit};
}

std::vector<kvcache::Span> spans_of(const Ids& sources, const Ids& targets) {
  std::vector<kvcache::Span> spans;
  for (size_t i = 0; i < sources.size(); ++i) {
    if (i > 0 && sources[i] == sources[i - 1] + 1 && targets[i] == targets[i - 1] + 1) continue;
    spans.push_back({static_cast<int32_t>(sources[i]), static_cast<int32_t>(targets[i]), static_cast<int32_t>(i)});
  }
  return spans;
}

void copy_on_cpu(const Plan& plan) {
  for (const auto& row : plan.rows) {
    for (size_t i = 0; i < plan.spans.size(); ++i) {
      const auto& span = plan.spans[i];
      const int64_t end = i + 1 < plan.spans.size() ? plan.spans[i + 1].first : plan.num_blocks;
      const int64_t device_slot = plan.to_device ? span.target : span.source;
      const int64_t host_slot = plan.to_device ? span.source : span.target;
      auto* device = reinterpret_cast<char*>(row.device) + device_slot * row.bytes;
      auto* host = reinterpret_cast<char*>(row.host) + host_slot * row.bytes;
      std::memcpy(plan.to_device ? device : host, plan.to_device ? host : device, (end - span.first) * row.bytes);
    }
  }
}

#ifdef PADDLE_WITH_CUDA
constexpr bool kCopiesOnGpu = true;

void check(cudaError_t status) { PD_CHECK(status == cudaSuccess, "CUDA: ", cudaGetErrorString(status)); }

// By which kernels know it.
uint64_t address_on_gpu(uint64_t host) {
  cudaPointerAttributes found{};
  check(cudaPointerGetAttributes(&found, reinterpret_cast<void*>(host)));
  PD_CHECK(found.type == cudaMemoryTypeHost && found.devicePointer != nullptr,
           "the host memory of a swap must be page-locked");
  return reinterpret_cast<uint64_t>(found.devicePointer);
}

// The table goes through memory of the stream, which the caller's `plan` has left when this returns.
void copy_on_gpu(Plan plan, cudaStream_t stream) {
  for (auto& row : plan.rows) row.host = address_on_gpu(row.host);
  const size_t rows_bytes = plan.rows.size() * sizeof(kvcache::Row);
  const size_t spans_bytes = plan.spans.size() * sizeof(kvcache::Span);
  char* table = nullptr;
  check(cudaMallocAsync(reinterpret_cast<void**>(&table), rows_bytes + spans_bytes, stream));
  check(cudaMemcpyAsync(table, plan.rows.data(), rows_bytes, cudaMemcpyHostToDevice, stream));
  check(cudaMemcpyAsync(table + rows_bytes, plan.spans.data(), spans_bytes, cudaMemcpyHostToDevice, stream));
  const kvcache::Copy copy{reinterpret_cast<kvcache::Row*>(table),
                           reinterpret_cast<kvcache::Span*>(table + rows_bytes),
                           0,
                           static_cast<int32_t>(plan.rows.size()),
                           static_cast<int32_t>(plan.spans.size()),
                           plan.num_blocks,
                           plan.to_device};
  void* arguments[] = {const_cast<kvcache::Copy*>(&copy)};
  // As for copies by layer in fastdeploy_kvcache_v1/worker/cuda/copies.py, which says why.
  int device = 0, groups = 2, threads = 512;
  if (plan.to_device) {
    check(cudaGetDevice(&device));
    check(cudaDeviceGetAttribute(&groups, cudaDevAttrMultiProcessorCount, device));
    threads = kvcache::kLanes * std::min(32, (64 + groups - 1) / groups);
  }
  check(cudaLaunchKernel(reinterpret_cast<const void*>(copy_cache_rows), dim3(groups), dim3(threads), arguments, 0,
                         stream));
  check(cudaFreeAsync(table, stream));
}

void run(const Plan& plan, const Tensor& cache, bool waits) {
  if (cache.is_cpu()) return copy_on_cpu(plan);
  check(cudaSetDevice(cache.place().GetDeviceId()));  // whose stream a tensor names is the current device's
  copy_on_gpu(plan, cache.stream());
  if (waits) check(cudaStreamSynchronize(cache.stream()));
}
#else
constexpr bool kCopiesOnGpu = false;

void run(const Plan& plan, const Tensor& cache, bool /*waits*/) {
  PD_CHECK(cache.is_cpu(), "these operators were built without nvcc, for tensors on a CPU: build them again with it");
  copy_on_cpu(plan);
}
#endif

void swap(const std::vector<Tensor>& caches, const Ids& host, int64_t host_blocks, const Ids& device_ids,
          const Ids& host_ids, int mode, bool waits) {
  PD_CHECK(!caches.empty() && caches.size() == host.size(), "a swap needs one host address for each cache tensor, got ",
           host.size(), " for ", caches.size());
  PD_CHECK(mode == kToHost || mode == kToDevice, "mode must be 0, to the host, or 1, to the device, got ", mode);
  PD_CHECK(device_ids.size() == host_ids.size(), "a swap needs as many blocks on both sides, got ", device_ids.size(),
           " and ", host_ids.size());
  check_ids("swap_block_ids_cpu", host_ids, host_blocks);
  check_written_once(mode == kToDevice ? device_ids : host_ids);
  Plan plan{{}, {}, static_cast<int32_t>(device_ids.size()), mode == kToDevice};
  for (size_t i = 0; i < caches.size(); ++i) {
    plan.rows.push_back(row_of(caches[i], host[i], caches[0].is_gpu()));
    check_ids("swap_block_ids_gpu", device_ids, caches[i].shape()[0]);
  }
  if (device_ids.empty()) return;
  plan.spans = plan.to_device ? spans_of(host_ids, device_ids) : spans_of(device_ids, host_ids);
  run(plan, caches[0], waits);
}

// `rank` is upstream's number of the device, which the tensors know.
void per_layer(const Tensor& cache, int64_t host, int64_t host_blocks, const Ids& device_ids, const Ids& host_ids,
               int /*rank*/, int mode) {
  swap({cache}, {host}, host_blocks, device_ids, host_ids, mode, true);
}

void per_layer_async(const Tensor& cache, int64_t host, int64_t host_blocks, const Ids& device_ids, const Ids& host_ids,
                     int /*rank*/, int mode) {
  swap({cache}, {host}, host_blocks, device_ids, host_ids, mode, false);
}

void all_layers(const std::vector<Tensor>& caches, const Ids& host, int64_t host_blocks, const Ids& device_ids,
                const Ids& host_ids, int /*rank*/, int mode) {
  swap(caches, host, host_blocks, device_ids, host_ids, mode, true);
}

}  // namespace

#define KVCACHE_EXPORT extern "C" __attribute__((visibility("default")))

// The Paddle that this was built against, "" for a build that does not say.
KVCACHE_EXPORT const char* kvcache_paddle() { return KVCACHE_PADDLE; }
KVCACHE_EXPORT int kvcache_copies_on_gpu() { return kCopiesOnGpu; }

#define KVCACHE_BLOCKS                                                      \
  "max_block_num_cpu: int64_t", "swap_block_ids_gpu: std::vector<int64_t>", \
      "swap_block_ids_cpu: std::vector<int64_t>", "rank: int", "mode: int"

PD_BUILD_OP(swap_cache_per_layer)
    .Inputs({"cache_gpu"})
    .Outputs({"cache_dst_out"})
    .SetInplaceMap({{"cache_gpu", "cache_dst_out"}})
    .Attrs({"cache_cpu_ptr: int64_t", KVCACHE_BLOCKS})
    .SetKernelFn(PD_KERNEL(per_layer));

PD_BUILD_OP(swap_cache_per_layer_async)
    .Inputs({"cache_gpu"})
    .Outputs({"cache_dst_out"})
    .SetInplaceMap({{"cache_gpu", "cache_dst_out"}})
    .Attrs({"cache_cpu_ptr: int64_t", KVCACHE_BLOCKS})
    .SetKernelFn(PD_KERNEL(per_layer_async));

PD_BUILD_OP(swap_cache_all_layers)
    .Inputs({paddle::Vec("cache_gpu_tensors")})
    .Outputs({paddle::Vec("cache_dst_outs")})
    .SetInplaceMap({{paddle::Vec("cache_gpu_tensors"), paddle::Vec("cache_dst_outs")}})
    .Attrs({"cache_cpu_ptrs: std::vector<int64_t>", KVCACHE_BLOCKS})
    .SetKernelFn(PD_KERNEL(all_layers));
