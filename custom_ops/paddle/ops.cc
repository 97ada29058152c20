// The core's copies as Paddle operators. Bytes only, so every dtype works.
// Docs: fastdeploy_kvcache_v1/worker/ops/paddle_ops.py
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../kvswap.h"
#include "paddle/phi/api/ext/op_meta_info.h"

#ifndef KVSWAP_PADDLE
#define KVSWAP_PADDLE ""
#endif

namespace {

using paddle::Tensor;

void check(int code) {
  if (code != KVSWAP_OK) PD_THROW(kvswap_last_error());
}

struct Rows {
  std::vector<kvswap_rows> device, host;
  bool on_gpu = false;
};

// The host pool is [host_block][layer][role][bytes]: one block's rows lie together, blocks are block_bytes apart.
Rows rows_of(const std::vector<Tensor>& caches, int64_t pool, int64_t host_blocks, int64_t block_bytes,
             int64_t offset) {
  PD_CHECK(!caches.empty(), "a copy needs cache tensors");
  PD_CHECK(pool > 0 && offset >= 0, "a copy needs a host pool and an offset into its blocks");
  Rows rows;
  rows.on_gpu = caches.front().is_gpu();
  for (const auto& cache : caches) {
    PD_CHECK(cache.initialized() && cache.numel() > 0, "a cache tensor is empty");
    PD_CHECK(cache.is_gpu() == rows.on_gpu && (cache.is_gpu() || cache.is_cpu()),
             "cache tensors must all be on the GPU or all on the CPU");
    PD_CHECK(!cache.shape().empty(), "the first axis of a cache tensor is the block");
    const int64_t blocks = cache.shape()[0];
    const int64_t row_bytes = cache.numel() / blocks * static_cast<int64_t>(phi::SizeOf(cache.dtype()));
    rows.device.push_back({reinterpret_cast<uint64_t>(cache.data()), blocks, row_bytes, row_bytes});
    rows.host.push_back({static_cast<uint64_t>(pool + offset), host_blocks, row_bytes, block_bytes});
    offset += row_bytes;
  }
  PD_CHECK(offset <= block_bytes, "the cache tensors' rows do not fit a host block");
  return rows;
}

class Plan {
 public:
  Plan(const std::vector<int64_t>& sources, const std::vector<int64_t>& targets) {
    PD_CHECK(kvswap_abi() == KVSWAP_ABI, "the operators and _core.so come from different builds: build them again");
    PD_CHECK(sources.size() == targets.size(), "a copy needs one target slot per source slot");
    check(kvswap_plan_slots(sources.data(), targets.data(), static_cast<int64_t>(sources.size()), &plan_));
  }
  ~Plan() { kvswap_plan_free(plan_); }
  Plan(const Plan&) = delete;
  Plan& operator=(const Plan&) = delete;
  const kvswap_plan* get() const { return plan_; }

 private:
  kvswap_plan* plan_ = nullptr;
};

int64_t let_go(void* tensors, int) {
  delete static_cast<std::vector<Tensor>*>(tensors);
  return 0;
}

void enqueue(const std::vector<Tensor>& caches, const Rows& rows, const kvswap_plan* plan, bool to_device,
             int64_t stream) {
  const auto* targets = (to_device ? rows.device : rows.host).data();
  const auto* sources = (to_device ? rows.host : rows.device).data();
  const auto entries = static_cast<int64_t>(rows.device.size());
  const auto queue = static_cast<uint64_t>(stream);
  if (rows.on_gpu) {
    check(kvswap_cuda_copy(targets, sources, entries, plan, to_device, KVSWAP_PATH_AUTO, queue));
  } else if (stream != 0) {
    // The tensors' memory must outlive the copy, also where the queue is closed between the two calls.
    auto kept = std::make_unique<std::vector<Tensor>>(caches);
    check(kvswap_queue_copy(queue, targets, sources, entries, plan, KVSWAP_PATH_AUTO));
    check(kvswap_queue_call(queue, let_go, kept.release()));
  } else {
    check(kvswap_copy(targets, sources, entries, plan, KVSWAP_PATH_AUTO));
  }
}

void copy(const std::vector<Tensor>& caches, const Rows& rows, const std::vector<int64_t>& device_slots,
          const std::vector<int64_t>& host_slots, bool to_device, int64_t stream) {
  const Plan plan(to_device ? host_slots : device_slots, to_device ? device_slots : host_slots);
  enqueue(caches, rows, plan.get(), to_device, stream);
}

void synchronize(bool on_gpu, int64_t stream) {
  const auto queue = static_cast<uint64_t>(stream);
  if (on_gpu) {
    check(kvswap_cuda_synchronize(queue));
  } else if (stream != 0) {
    kvswap_event* event = nullptr;
    check(kvswap_queue_record(queue, &event));
    kvswap_event_wait(event, -1);
    const bool failed = kvswap_event_failure(event) != 0;
    kvswap_event_free(event);
    PD_CHECK(!failed, "earlier work of this unit on the queue failed, so nothing was copied");
  }
}

void swap_per_layer_async(std::vector<Tensor>& caches, int64_t host_pool, int64_t host_blocks,  // NOLINT: in place
                          int64_t block_bytes, int64_t offset, const std::vector<int64_t>& device_slots,
                          const std::vector<int64_t>& host_slots, bool to_device, int64_t stream) {
  copy(caches, rows_of(caches, host_pool, host_blocks, block_bytes, offset), device_slots, host_slots, to_device,
       stream);
}

void swap_per_layer(std::vector<Tensor>& caches, int64_t host_pool, int64_t host_blocks,  // NOLINT: in place
                    int64_t block_bytes, int64_t offset, const std::vector<int64_t>& device_slots,
                    const std::vector<int64_t>& host_slots, bool to_device, int64_t stream) {
  swap_per_layer_async(caches, host_pool, host_blocks, block_bytes, offset, device_slots, host_slots, to_device,
                       stream);
  synchronize(caches.front().is_gpu(), stream);
}

void swap_all_layers(std::vector<Tensor>& caches, int64_t host_pool, int64_t host_blocks,  // NOLINT: in place
                     int64_t block_bytes, const std::vector<int64_t>& device_slots,
                     const std::vector<int64_t>& host_slots, bool to_device, int64_t stream) {
  const Rows rows = rows_of(caches, host_pool, host_blocks, block_bytes, 0);
  copy(caches, rows, device_slots, host_slots, to_device, stream);
}

// The same for rows and a plan that the caller has already: `host_rows` holds an address, a number of rows, a row's
// bytes and a pitch per tensor; `plan` is a kvswap_plan, kept until the call returns.
void swap_rows(std::vector<Tensor>& caches, const std::vector<int64_t>& host_rows, int64_t plan,  // NOLINT: in place
               bool to_device, int64_t stream) {
  PD_CHECK(!caches.empty() && host_rows.size() == 4 * caches.size() && plan != 0,
           "a copy needs cache tensors, the host rows of each, and a plan");
  Rows rows;
  rows.on_gpu = caches.front().is_gpu();
  for (size_t i = 0; i < caches.size(); ++i) {
    const auto& cache = caches[i];
    const int64_t* host = &host_rows[4 * i];
    PD_CHECK(cache.initialized() && cache.numel() > 0 && cache.is_gpu() == rows.on_gpu,
             "cache tensors must have memory, all on the GPU or all on the CPU");
    const int64_t nbytes = cache.numel() * static_cast<int64_t>(phi::SizeOf(cache.dtype()));
    PD_CHECK(host[2] > 0 && nbytes % host[2] == 0, "a cache tensor is not a number of whole rows");
    rows.device.push_back({reinterpret_cast<uint64_t>(cache.data()), nbytes / host[2], host[2], host[2]});
    rows.host.push_back({static_cast<uint64_t>(host[0]), host[1], host[2], host[3]});
  }
  enqueue(caches, rows, reinterpret_cast<const kvswap_plan*>(plan), to_device, stream);
}

// Who gave which memory, so that it goes back the same way, once.
struct HostBuffers {
  struct Buffer {
    int64_t nbytes;
    bool page_locked;
  };
  std::mutex mutex;
  std::map<int64_t, Buffer> buffers;
};

HostBuffers& host_buffers() {
  static auto* instance = new HostBuffers;
  return *instance;
}

int64_t& value_of(Tensor& address) {
  PD_CHECK(address.is_cpu() && address.numel() == 1 && address.dtype() == phi::DataType::INT64,
           "the address must be an int64 tensor with one element on the CPU");
  return *static_cast<int64_t*>(address.data());
}

void host_alloc(Tensor& address, int64_t nbytes) {  // NOLINT: in place
  int64_t& value = value_of(address);
  PD_CHECK(value == 0, "the address tensor holds a buffer already");
  void* memory = nullptr;
  const bool page_locked = kvswap_cuda_available() == KVSWAP_OK;
  check(page_locked ? kvswap_cuda_host_alloc(nbytes, &memory) : kvswap_host_alloc(nbytes, -1, &memory));
  value = reinterpret_cast<int64_t>(memory);
  std::lock_guard<std::mutex> lock(host_buffers().mutex);
  host_buffers().buffers[value] = {nbytes, page_locked};
}

void host_free(Tensor& address) {  // NOLINT: in place
  int64_t& value = value_of(address);
  std::lock_guard<std::mutex> lock(host_buffers().mutex);
  const auto found = host_buffers().buffers.find(value);
  PD_CHECK(found != host_buffers().buffers.end(), "this is no buffer of cuda_host_alloc, or it was freed before");
  auto* memory = reinterpret_cast<void*>(value);
  check(found->second.page_locked ? kvswap_cuda_host_free(memory) : kvswap_host_free(memory, found->second.nbytes));
  host_buffers().buffers.erase(found);
  value = 0;
}

}  // namespace

// The Paddle that this was built against, "" for a build that does not say.
extern "C" KVSWAP_API const char* kvswap_paddle_version(void) { return KVSWAP_PADDLE; }

PD_BUILD_OP(swap_cache_per_layer)
    .Inputs({paddle::Vec("caches")})
    .Outputs({paddle::Vec("caches_out")})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .Attrs({"host_pool: int64_t", "host_blocks: int64_t", "block_bytes: int64_t", "offset: int64_t",
            "device_slots: std::vector<int64_t>", "host_slots: std::vector<int64_t>", "to_device: bool",
            "stream: int64_t"})
    .SetKernelFn(PD_KERNEL(swap_per_layer));

PD_BUILD_OP(swap_cache_per_layer_async)
    .Inputs({paddle::Vec("caches")})
    .Outputs({paddle::Vec("caches_out")})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .Attrs({"host_pool: int64_t", "host_blocks: int64_t", "block_bytes: int64_t", "offset: int64_t",
            "device_slots: std::vector<int64_t>", "host_slots: std::vector<int64_t>", "to_device: bool",
            "stream: int64_t"})
    .SetKernelFn(PD_KERNEL(swap_per_layer_async));

PD_BUILD_OP(swap_cache_all_layers)
    .Inputs({paddle::Vec("caches")})
    .Outputs({paddle::Vec("caches_out")})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .Attrs({"host_pool: int64_t", "host_blocks: int64_t", "block_bytes: int64_t", "device_slots: std::vector<int64_t>",
            "host_slots: std::vector<int64_t>", "to_device: bool", "stream: int64_t"})
    .SetKernelFn(PD_KERNEL(swap_all_layers));

PD_BUILD_OP(swap_cache_rows)
    .Inputs({paddle::Vec("caches")})
    .Outputs({paddle::Vec("caches_out")})
    .SetInplaceMap({{paddle::Vec("caches"), paddle::Vec("caches_out")}})
    .Attrs({"host_rows: std::vector<int64_t>", "plan: int64_t", "to_device: bool", "stream: int64_t"})
    .SetKernelFn(PD_KERNEL(swap_rows));

PD_BUILD_OP(cuda_host_alloc)
    .Inputs({"address"})
    .Outputs({"address_out"})
    .SetInplaceMap({{"address", "address_out"}})
    .Attrs({"nbytes: int64_t"})
    .SetKernelFn(PD_KERNEL(host_alloc));

PD_BUILD_OP(cuda_host_free)
    .Inputs({"address"})
    .Outputs({"address_out"})
    .SetInplaceMap({{"address", "address_out"}})
    .SetKernelFn(PD_KERNEL(host_free));
