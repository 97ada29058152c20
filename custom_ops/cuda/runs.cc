// One cuMemcpyAsync per run whose rows are neighbours on both sides, one cuMemcpy2DAsync for any other.
#include "paths.h"

namespace kvswap::cuda {
namespace {

Memcpy2D strided(const Entry& entry, const kvswap_run& run, bool to_device) {
  Memcpy2D copy{};
  copy.source_type = to_device ? kHost : kDevice;
  copy.target_type = to_device ? kDevice : kHost;
  const uint64_t source = entry.source_row(run.source), target = entry.target_row(run.target);
  if (to_device) {
    copy.source_host = reinterpret_cast<const void*>(source);
    copy.target_device = target;
  } else {
    copy.source_device = source;
    copy.target_host = reinterpret_cast<void*>(target);
  }
  copy.source_pitch = static_cast<size_t>(entry.source.pitch);
  copy.target_pitch = static_cast<size_t>(entry.target.pitch);
  copy.width = static_cast<size_t>(entry.row_bytes());
  copy.height = static_cast<size_t>(run.blocks);
  return copy;
}

}  // namespace

void copy_by_runs(const Driver& driver, const Entries& entries, const Plan& plan, bool to_device, Stream stream) {
  for (const auto& entry : entries) {
    for (const auto& run : plan.runs) {
      if (run.blocks == 1 || entry.is_dense()) {
        const auto nbytes = static_cast<size_t>(run.blocks * entry.row_bytes());
        check(driver, driver.copy(entry.target_row(run.target), entry.source_row(run.source), nbytes, stream),
              "cuMemcpyAsync");
      } else {
        const Memcpy2D copy = strided(entry, run, to_device);
        check(driver, driver.copy_2d(&copy, stream), "cuMemcpy2DAsync");
      }
    }
  }
}

}  // namespace kvswap::cuda
