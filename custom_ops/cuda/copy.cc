// The C face of GPU copies: checks, the addresses the GPU knows, then one path.
#include "../core/plan.h"
#include "costs.h"

namespace kvswap::cuda {
namespace {

void check_path(const Copy& copy, int path) {
  if (path < KVSWAP_PATH_RUNS || path > KVSWAP_PATH_STAGED) refuse("path %d is not one of CUDA's", path);
  if (path == KVSWAP_PATH_BATCH && copy.driver.copy_batch == nullptr) {
    throw Error(KVSWAP_UNAVAILABLE, "this CUDA driver has no cuMemcpyBatchAsync (12.8 has)");
  }
  if (path != KVSWAP_PATH_KERNEL && path != KVSWAP_PATH_STAGED) return;
  if (copy.launch == nullptr) {
    throw Error(KVSWAP_UNAVAILABLE, "the copy kernel (_core_cuda.so) was not built or does not load");
  }
  if (!fits_kernel(copy)) {
    throw Error(KVSWAP_UNAVAILABLE,
                "kernels cannot reach this host memory (it is not page-locked), or not these slots");
  }
  if (path == KVSWAP_PATH_STAGED && !fits_staging(copy)) {
    throw Error(KVSWAP_UNAVAILABLE, "staging needs device memory for a block, and the rows of whole host blocks");
  }
}

// False where this driver or GPU does not do it after all.
bool copy_by(const Copy& copy, int path) {
  if (path == KVSWAP_PATH_BATCH) return copy_by_batch(copy);
  if (path == KVSWAP_PATH_KERNEL) return copy_by_kernel(copy);
  if (path == KVSWAP_PATH_STAGED) return copy_staged(copy);
  copy_by_runs(copy);
  return true;
}

bool has_path(int path) {
  if (path == KVSWAP_PATH_BATCH) return driver().copy_batch != nullptr;
  if (path == KVSWAP_PATH_KERNEL) return kernel_launch() != nullptr;
  if (path == KVSWAP_PATH_STAGED) return kernel_launch() != nullptr && blocks_in_staging(1) > 0;
  return path == KVSWAP_PATH_RUNS;
}

}  // namespace

Copy make_copy(const Driver& driver, KernelLaunch launch, const Entries& entries, const Plan& plan, bool to_device,
               Stream stream) {
  Copy copy{driver, launch, entries, plan, to_device, true, false, stream};
  for (auto& entry : copy.entries) {
    uint64_t& host = to_device ? entry.source.address : entry.target.address;
    DevicePointer found = 0;
    const bool known = driver.pointer_attribute(&found, kDevicePointerAttribute, host) == kSuccess && found != 0;
    copy.is_page_locked = copy.is_page_locked && known;
    copy.has_alias = copy.has_alias || (known && found != host);
    if (known) host = found;
  }
  return copy;
}

void enqueue(const Copy& copy, int path) {
  if (path != KVSWAP_PATH_AUTO) {
    check_path(copy, path);
    if (copy_by(copy, path)) return;
    if (path == KVSWAP_PATH_BATCH) throw Error(KVSWAP_UNAVAILABLE, "this GPU does not support cuMemcpyBatchAsync");
    throw Error(KVSWAP_UNAVAILABLE, format("this GPU cannot run the copy kernel (CUDA error %d): build it for this "
                                           "GPU, with a CUDA toolkit that is no newer than the driver",
                                           kernel_refusal()));
  }
  for (int chosen = choose_path(copy); !copy_by(copy, chosen); chosen = choose_path(copy)) {
    forbid_path(chosen);
    if (chosen == KVSWAP_PATH_STAGED) forbid_path(KVSWAP_PATH_KERNEL);  // the same kernel
  }
}

}  // namespace kvswap::cuda

namespace {

using kvswap::cuda::Copy;

template <typename Body>
int with_copy(const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries, const kvswap_plan* plan,
              int to_device, uint64_t stream, Body body) {
  return kvswap::guarded([&] {
    const auto& runs = *kvswap::plan_of(plan);
    const auto rows = kvswap::checked_entries(targets, sources, entries, runs);
    const auto& driver = kvswap::cuda::driver_with_context();
    body(kvswap::cuda::make_copy(driver, kvswap::cuda::kernel_launch(), rows, runs, to_device != 0,
                                 reinterpret_cast<void*>(stream)));
  });
}

}  // namespace

int kvswap_cuda_available(void) {
  return kvswap::guarded([] { kvswap::cuda::driver(); });
}

int kvswap_cuda_has_path(int path) {
  bool has = false;
  const int code =
      kvswap::guarded([&] { has = kvswap::cuda::driver().copy != nullptr && kvswap::cuda::has_path(path); });
  return code == KVSWAP_OK && has ? 1 : 0;
}

int kvswap_cuda_allow(int paths) {
  return kvswap::guarded([&] { kvswap::cuda::allow_paths(paths); });
}

int kvswap_cuda_allowed(void) { return kvswap::cuda::allowed_paths(); }

int kvswap_cuda_costs(int to_device, kvswap_costs* costs) {
  return kvswap::guarded([&] { *costs = kvswap::cuda::costs_of(to_device != 0); });
}

int kvswap_cuda_set_costs(int to_device, const kvswap_costs* costs) {
  return kvswap::guarded([&] { kvswap::cuda::set_costs(to_device != 0, *costs); });
}

int kvswap_cuda_estimate(const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries,
                         const kvswap_plan* plan, int to_device, int path, kvswap_estimate* estimate, int* chosen) {
  return with_copy(targets, sources, entries, plan, to_device, 0, [&](const Copy& copy) {
    const int taken = path == KVSWAP_PATH_AUTO ? kvswap::cuda::choose_path(copy) : path;
    *estimate = kvswap::cuda::estimate(copy, taken);
    if (chosen != nullptr) *chosen = taken;
  });
}

int kvswap_cuda_synchronize(uint64_t stream) {
  return kvswap::guarded([&] {
    const auto& driver = kvswap::cuda::driver_with_context();
    kvswap::cuda::check(driver, driver.synchronize(reinterpret_cast<void*>(stream)), "cuStreamSynchronize");
  });
}

int kvswap_cuda_copy(const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries, const kvswap_plan* plan,
                     int to_device, int path, uint64_t stream) {
  if (stream == 0 || stream == kvswap::cuda::kLegacyStream) {
    return kvswap::guarded([] { kvswap::refuse("a copy needs a stream of its own, not the legacy NULL stream"); });
  }
  return with_copy(targets, sources, entries, plan, to_device, stream, [&](const Copy& copy) {
    if (!copy.plan.runs.empty()) kvswap::cuda::enqueue(copy, path);
  });
}
