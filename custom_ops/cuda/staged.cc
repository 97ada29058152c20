// To the host by way of device memory: the kernel gathers whole blocks as the host pool has them, one DMA takes each.
//
// There is one staging memory. On one stream its pieces follow each other, so nothing is overwritten before it has
// left; an event keeps copies of other streams behind the last one.
#include <algorithm>
#include <mutex>

#include "paths.h"

namespace kvswap::cuda {
namespace {

struct Staging {
  std::mutex mutex;  // held while a copy is enqueued, so that pieces of two copies never mix
  uint64_t address = 0;
  int64_t nbytes = 0;
  Event left = nullptr;  // the last copy has left the memory
};

Staging& staging() {
  static auto* instance = new Staging;
  return *instance;
}

// Later users of the memory wait for what this copy submitted, also where it failed half way.
class Turn {
 public:
  explicit Turn(const Copy& copy) : copy_(copy), lock_(staging().mutex) {
    check(copy.driver, copy.driver.wait_event(copy.stream, staging().left, 0), "cuStreamWaitEvent");
  }
  ~Turn() { copy_.driver.event_record(staging().left, copy_.stream); }
  Turn(const Turn&) = delete;
  Turn& operator=(const Turn&) = delete;

 private:
  const Copy& copy_;
  std::lock_guard<std::mutex> lock_;
};

// The first `blocks` blocks of `left`, which loses them.
std::vector<kvswap_run> take_blocks(std::vector<kvswap_run>& left, size_t& next, int64_t blocks) {
  std::vector<kvswap_run> taken;
  while (next < left.size() && blocks > 0) {
    kvswap_run& run = left[next];
    const int64_t some = std::min(blocks, run.blocks);
    taken.push_back({run.source, run.target, some});
    run = {run.source + some, run.target + some, run.blocks - some};
    blocks -= some;
    if (run.blocks == 0) ++next;
  }
  return taken;
}

Plan plan_of_runs(std::vector<kvswap_run> runs) {
  Plan plan;
  plan.grids = grids_of(runs);
  for (const auto& run : runs) {
    plan.blocks += run.blocks;
    plan.source_end = std::max(plan.source_end, run.source + run.blocks);
    plan.target_end = std::max(plan.target_end, run.target + run.blocks);
  }
  plan.runs = std::move(runs);
  return plan;
}

bool copy_piece(const Copy& copy, const std::vector<kvswap_run>& piece) {
  const int64_t block = block_bytes(copy.entries);
  const uint64_t memory = staging().address;
  std::vector<kvswap_run> in, out;
  int64_t staged = 0;
  for (const auto& run : piece) {
    in.push_back({run.source, staged, run.blocks});
    out.push_back({staged, run.target, run.blocks});
    staged += run.blocks;
  }
  Copy gather = copy;
  uint64_t offset = 0;
  for (auto& entry : gather.entries) {
    entry.target = {memory + offset, staged, entry.row_bytes(), block};
    offset += static_cast<uint64_t>(entry.row_bytes());
  }
  const Plan gathered = plan_of_runs(std::move(in)), landed = plan_of_runs(std::move(out));
  const Copy first{copy.driver, copy.launch, gather.entries, gathered, false, true, false, copy.stream};
  if (!copy_by_kernel(first)) return false;
  const kvswap_rows& pool = copy.entries.front().target;
  const Entries whole{{{pool.address, pool.num_rows, block, pool.pitch}, {memory, staged, block, block}}};
  copy_by_runs({copy.driver, copy.launch, whole, landed, false, true, copy.has_alias, copy.stream});
  return true;
}

}  // namespace

int64_t block_bytes(const Entries& entries) {
  int64_t sum = 0;
  for (const auto& entry : entries) sum += entry.row_bytes();
  return sum;
}

int64_t blocks_in_staging(int64_t bytes) {
  const std::lock_guard<std::mutex> lock(staging().mutex);
  return staging().nbytes / bytes;
}

bool fits_staging(const Copy& copy) {
  if (copy.to_device || blocks_in_staging(block_bytes(copy.entries)) == 0) return false;
  const kvswap_rows& pool = copy.entries.front().target;
  uint64_t end = pool.address;
  for (const auto& entry : copy.entries) {
    if (entry.target.address != end || entry.target.pitch != pool.pitch) return false;
    end += static_cast<uint64_t>(entry.row_bytes());
  }
  return end - pool.address <= static_cast<uint64_t>(pool.pitch);
}

bool copy_staged(const Copy& copy) {
  const Turn turn(copy);
  std::vector<kvswap_run> left = copy.plan.runs;
  const int64_t capacity = staging().nbytes / block_bytes(copy.entries);
  if (capacity == 0) return copy_by_kernel(copy);  // replaced since it was asked for
  for (size_t next = 0; next < left.size();) {
    if (!copy_piece(copy, take_blocks(left, next, capacity))) return false;
  }
  return true;
}

}  // namespace kvswap::cuda

int kvswap_cuda_set_staging(uint64_t address, int64_t nbytes) {
  return kvswap::guarded([&] {
    if (nbytes < 0 || (nbytes > 0 && address == 0)) {
      kvswap::refuse("%lld bytes at %#llx are no staging memory", static_cast<long long>(nbytes),
                     static_cast<unsigned long long>(address));
    }
    auto& memory = kvswap::cuda::staging();
    const std::lock_guard<std::mutex> lock(memory.mutex);
    if (nbytes > 0 && memory.left == nullptr) {
      const auto& driver = kvswap::cuda::driver_with_context();
      if (driver.event_create == nullptr || driver.event_record == nullptr || driver.wait_event == nullptr) {
        throw kvswap::Error(KVSWAP_UNAVAILABLE, "the CUDA driver lacks events for staging");
      }
      kvswap::cuda::check(driver, driver.event_create(&memory.left, kvswap::cuda::kEventWithoutTiming),
                          "cuEventCreate");
    }
    memory.address = address;
    memory.nbytes = nbytes;
  });
}
