// The C face of GPU copies: checks, then one of three paths.
#include "paths.h"

namespace kvswap::cuda {
namespace {

// Copy engines reach the link's rate from here on whatever runs beside them. Chosen from published measurements, not
// from ours: benchmarks/copy_gpu.py compares the paths.
constexpr int64_t kEngineRow = 64 << 10;
// This many driver calls, or fewer, cost less than a batch is worth.
constexpr int64_t kFewCalls = 4;

constexpr uint64_t kLegacyStream = 1;  // CU_STREAM_LEGACY

int64_t driver_calls(const Entries& entries, const Plan& plan) {
  return static_cast<int64_t>(entries.size() * plan.runs.size());
}

void check_path(int path, const Driver& driver, const Entries& entries, const Plan& plan) {
  if (path != KVSWAP_PATH_AUTO && (path < KVSWAP_PATH_RUNS || path > KVSWAP_PATH_KERNEL)) {
    refuse("path %d is not one of CUDA's", path);
  }
  if (path == KVSWAP_PATH_BATCH && driver.copy_batch == nullptr) {
    throw Error(KVSWAP_UNAVAILABLE, "this CUDA driver has no cuMemcpyBatchAsync (12.8 has)");
  }
  if (path == KVSWAP_PATH_KERNEL && kernel_launch() == nullptr) {
    throw Error(KVSWAP_UNAVAILABLE, "the copy kernel (_core_cuda.so) was not built or does not load");
  }
  if (path == KVSWAP_PATH_KERNEL && !fits_kernel(entries, plan)) {
    refuse("the copy kernel needs rows on 16-byte borders");
  }
}

}  // namespace

int choose_path(const Entries& entries, const Plan& plan, bool has_batch, bool has_kernel) {
  if (driver_calls(entries, plan) <= kFewCalls) return KVSWAP_PATH_RUNS;
  const bool small = entries.front().row_bytes() < kEngineRow;
  // Runs of strided rows are one 2D copy each: scattered blocks are what the kernel is for.
  const bool scattered = plan.blocks < 2 * static_cast<int64_t>(plan.runs.size());
  if (small && scattered && has_kernel && fits_kernel(entries, plan)) return KVSWAP_PATH_KERNEL;
  return has_batch ? KVSWAP_PATH_BATCH : KVSWAP_PATH_RUNS;
}

void enqueue(const Driver& driver, KernelLaunch launch, const Entries& entries, const Plan& plan, bool to_device,
             int path, Stream stream) {
  const bool is_forced = path != KVSWAP_PATH_AUTO, has_batch = driver.copy_batch != nullptr;
  if (!is_forced) path = choose_path(entries, plan, has_batch, launch != nullptr);
  if (path == KVSWAP_PATH_KERNEL) {
    if (copy_by_kernel(driver, launch, entries, plan, to_device, stream)) return;
    if (is_forced) throw Error(KVSWAP_UNAVAILABLE, "this GPU cannot run the copy kernel, or not on this host memory");
    path = choose_path(entries, plan, has_batch, false);
  }
  if (path == KVSWAP_PATH_BATCH && copy_by_batch(driver, entries, plan, stream)) return;
  if (path == KVSWAP_PATH_BATCH && is_forced) {
    throw Error(KVSWAP_UNAVAILABLE, "this GPU does not support cuMemcpyBatchAsync");
  }
  copy_by_runs(driver, entries, plan, to_device, stream);
}

}  // namespace kvswap::cuda

int kvswap_cuda_available(void) {
  return kvswap::guarded([] { kvswap::cuda::driver(); });
}

int kvswap_cuda_has_path(int path) {
  bool has = false;
  const int code = kvswap::guarded([&] {
    const auto& driver = kvswap::cuda::driver();
    has = path == KVSWAP_PATH_RUNS || (path == KVSWAP_PATH_BATCH && driver.copy_batch != nullptr) ||
          (path == KVSWAP_PATH_KERNEL && kvswap::cuda::kernel_launch() != nullptr);
  });
  return code == KVSWAP_OK && has ? 1 : 0;
}

int kvswap_cuda_synchronize(uint64_t stream) {
  return kvswap::guarded([&] {
    const auto& driver = kvswap::cuda::driver_with_context();
    kvswap::cuda::check(driver, driver.synchronize(reinterpret_cast<void*>(stream)), "cuStreamSynchronize");
  });
}

int kvswap_cuda_copy(const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries, const kvswap_plan* plan,
                     int to_device, int path, uint64_t stream) {
  return kvswap::guarded([&] {
    if (stream == 0 || stream == kvswap::cuda::kLegacyStream) {
      kvswap::refuse("a copy needs a stream of its own, not the legacy NULL stream");
    }
    const auto& runs = *kvswap::plan_of(plan);
    const auto rows = kvswap::checked_entries(targets, sources, entries, runs);
    const auto& driver = kvswap::cuda::driver_with_context();
    kvswap::cuda::check_path(path, driver, rows, runs);
    if (runs.runs.empty()) return;
    kvswap::cuda::enqueue(driver, kvswap::cuda::kernel_launch(), rows, runs, to_device != 0, path,
                          reinterpret_cast<void*>(stream));
  });
}
