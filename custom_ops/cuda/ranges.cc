// Copies between two places in device memory: ranges of bytes, each wherever it lies.
#include <algorithm>
#include <iterator>
#include <utility>
#include <vector>

#include "costs.h"

namespace kvswap::cuda {
namespace {

using Ranges = std::vector<kvswap_run>;

void check_range(const kvswap_run& range) {
  if (range.source < 1 || range.target < 1 || range.blocks < 1 || range.source > INT64_MAX - range.blocks ||
      range.target > INT64_MAX - range.blocks) {
    refuse("%lld bytes from %#llx to %#llx are no copy of device memory", static_cast<long long>(range.blocks),
           static_cast<unsigned long long>(range.source), static_cast<unsigned long long>(range.target));
  }
}

// A batch promises no order, so that two copies of one byte would be a race.
void check_overlaps(const Ranges& ranges) {
  std::vector<std::pair<int64_t, int64_t>> written;
  written.reserve(ranges.size());
  for (const auto& range : ranges) written.emplace_back(range.target, range.target + range.blocks);
  std::sort(written.begin(), written.end());
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i].first < written[i - 1].second) refuse("two of the ranges write the same memory");
  }
  for (const auto& range : ranges) {
    const auto next = std::lower_bound(written.begin(), written.end(), std::make_pair(range.source, INT64_MAX));
    if ((next != written.end() && next->first < range.source + range.blocks) ||
        (next != written.begin() && std::prev(next)->second > range.source)) {
      refuse("a range reads what another one writes");
    }
  }
}

Ranges checked(const kvswap_run* ranges, int64_t count) {
  if (count < 0 || (count > 0 && ranges == nullptr)) refuse("a copy needs its ranges");
  Ranges all(ranges, ranges + count);
  for (const auto& range : all) check_range(range);
  check_overlaps(all);
  return all;
}

bool fits(const Grid& grid) { return grid.source_step <= kMaxPitch && grid.target_step <= kMaxPitch; }

void copy_grid(const Driver& cuda, const Grid& grid, Stream stream) {
  if (grid.count == 1 || !fits(grid)) {
    for (int64_t i = 0; i < grid.count; ++i) {
      const auto to = static_cast<DevicePointer>(grid.target + i * grid.target_step);
      const auto of = static_cast<DevicePointer>(grid.source + i * grid.source_step);
      check(cuda, cuda.copy(to, of, static_cast<size_t>(grid.blocks), stream), "cuMemcpyAsync");
    }
    return;
  }
  Memcpy2D made{};
  made.source_type = made.target_type = kUnified;  // the address says whose GPU's memory it is
  made.source_device = static_cast<DevicePointer>(grid.source);
  made.target_device = static_cast<DevicePointer>(grid.target);
  made.source_pitch = static_cast<size_t>(grid.source_step);
  made.target_pitch = static_cast<size_t>(grid.target_step);
  made.width = static_cast<size_t>(grid.blocks);
  made.height = static_cast<size_t>(grid.count);
  check(cuda, cuda.copy_2d(&made, stream), "cuMemcpy2DAsync");
}

// False, nothing submitted, where this driver or GPU has no batches after all.
bool copy_in_batches(const Driver& cuda, const Ranges& ranges, Stream stream) {
  std::vector<DevicePointer> targets, sources;
  std::vector<size_t> sizes;
  for (const auto& range : ranges) {
    targets.push_back(static_cast<DevicePointer>(range.target));
    sources.push_back(static_cast<DevicePointer>(range.source));
    sizes.push_back(static_cast<size_t>(range.blocks));
  }
  return submit_batches(cuda, targets, sources, sizes, stream);
}

// What costs the submitting thread least; a copy engine moves the bytes either way.
bool is_batch_cheaper(const Ranges& ranges, const std::vector<Grid>& grids) {
  const kvswap_costs costs = costs_of(true);
  const auto count = static_cast<int64_t>(ranges.size()), batches = (count + kBatchCopies - 1) / kBatchCopies;
  return static_cast<double>(batches) * costs.batch_ns + static_cast<double>(count) * costs.descriptor_ns <
         static_cast<double>(grids.size()) * costs.call_ns;
}

void copy_ranges(const Ranges& ranges, int path, Stream stream) {
  const Driver& cuda = driver_with_context();
  const auto grids = grids_of(ranges);
  const bool may_batch = cuda.copy_batch != nullptr && (allowed_paths() & 1 << KVSWAP_PATH_BATCH) != 0;
  if (path == KVSWAP_PATH_BATCH || (path == KVSWAP_PATH_AUTO && may_batch && is_batch_cheaper(ranges, grids))) {
    if (cuda.copy_batch != nullptr && copy_in_batches(cuda, ranges, stream)) return;
    if (path == KVSWAP_PATH_BATCH) throw Error(KVSWAP_UNAVAILABLE, "there is no cuMemcpyBatchAsync here (12.8 has)");
    forbid_path(KVSWAP_PATH_BATCH);
  }
  for (const auto& grid : grids) copy_grid(cuda, grid, stream);
}

}  // namespace
}  // namespace kvswap::cuda

int kvswap_cuda_copy_ranges(const kvswap_run* ranges, int64_t count, int path, uint64_t stream) {
  return kvswap::guarded([&] {
    if (stream <= kvswap::cuda::kLegacyStream)
      kvswap::refuse("a copy needs a stream of its own, not the legacy NULL stream");
    if (path != KVSWAP_PATH_AUTO && path != KVSWAP_PATH_RUNS && path != KVSWAP_PATH_BATCH) {
      kvswap::refuse("path %d does not copy ranges", path);
    }
    const auto all = kvswap::cuda::checked(ranges, count);
    if (!all.empty()) kvswap::cuda::copy_ranges(all, path, reinterpret_cast<void*>(stream));
  });
}
