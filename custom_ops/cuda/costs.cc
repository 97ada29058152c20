#include "costs.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <utility>
#include <vector>

#include "rectangles.h"

namespace kvswap::cuda {
namespace {

constexpr double kImpossible = std::numeric_limits<double>::infinity();
constexpr int kPaths[] = {KVSWAP_PATH_RUNS, KVSWAP_PATH_BATCH, KVSWAP_PATH_KERNEL, KVSWAP_PATH_STAGED};
constexpr int kEveryPath =
    1 << KVSWAP_PATH_RUNS | 1 << KVSWAP_PATH_BATCH | 1 << KVSWAP_PATH_KERNEL | 1 << KVSWAP_PATH_STAGED;

// Before a GPU was measured: PCIe 5 and a driver of today, from published figures. docs/native-ops.md has the table.
constexpr kvswap_costs kDefault = {2000, 1000, 40, 50, 6000, 500, 1000, 4000, 2500, 40, 400};

std::mutex costs_mutex;
kvswap_costs current[2] = {kDefault, kDefault};
std::atomic<int> allowed{kEveryPath};

// The worker's thread submits every layer before a pass starts: its time counts half once more. A kernel takes
// multiprocessors from the model, so a copy engine may be slower by this much.
constexpr double kOfThread = 0.5;
constexpr double kOfMultiprocessors = 1.05;

kvswap_estimate sum(int64_t calls, int64_t descriptors, double thread_ns, double gpu_ns) {
  return {calls, descriptors, thread_ns, gpu_ns, std::max(thread_ns, gpu_ns) + kOfThread * thread_ns};
}

double bytes_of(const Copy& copy) { return static_cast<double>(block_bytes(copy.entries) * copy.plan.blocks); }

// Of one entry.
struct Count {
  int64_t calls = 0, rows = 0, ranges = 0;
};

Count count(const Entry& entry, const Plan& plan) {
  Count made;
  for_each_rectangle(entry, plan, [&](const Rectangle& rectangle) {
    ++made.calls;
    if (rectangle.rows > 1) made.rows += rectangle.rows;
  });
  made.ranges = entry.is_dense() ? static_cast<int64_t>(plan.runs.size()) : plan.blocks;
  return made;
}

bool are_alike(const Entry& one, const Entry& other) {
  return one.row_bytes() == other.row_bytes() && one.target.pitch == other.target.pitch &&
         one.source.pitch == other.source.pitch;
}

// Entries of one shape are counted once: a model has one or two, however many layers it has.
Count count(const Copy& copy) {
  Count all;
  std::vector<std::pair<const Entry*, Count>> shapes;
  for (const auto& entry : copy.entries) {
    auto known =
        std::find_if(shapes.begin(), shapes.end(), [&](auto& shape) { return are_alike(*shape.first, entry); });
    if (known == shapes.end()) known = shapes.insert(known, {&entry, count(entry, copy.plan)});
    all.calls += known->second.calls, all.rows += known->second.rows, all.ranges += known->second.ranges;
  }
  return all;
}

int64_t pieces(int64_t whole, int64_t piece) { return (whole + piece - 1) / piece; }

kvswap_estimate of_runs(const Copy& copy, const kvswap_costs& costs) {
  const Count counted = count(copy);
  const auto calls = static_cast<double>(counted.calls);
  return sum(
      counted.calls, 0, calls * costs.call_ns,
      calls * costs.copy_ns + static_cast<double>(counted.rows) * costs.row_ns + bytes_of(copy) / costs.engine_rate);
}

kvswap_estimate of_batch(const Copy& copy, const kvswap_costs& costs) {
  const int64_t ranges = count(copy).ranges, calls = pieces(ranges, kBatchCopies);
  const auto descriptors = static_cast<double>(ranges);
  return sum(calls, ranges, static_cast<double>(calls) * costs.batch_ns + descriptors * costs.descriptor_ns,
             descriptors * costs.batch_copy_ns + bytes_of(copy) / costs.engine_rate);
}

int64_t launches(const Copy& copy) {
  const auto entries = static_cast<int64_t>(copy.entries.size()), runs = static_cast<int64_t>(copy.plan.runs.size());
  return pieces(entries, kKernelEntries) * pieces(runs, kKernelRuns);
}

kvswap_estimate of_kernel(const Copy& copy, const kvswap_costs& costs) {
  double moving_ns = 0;  // narrow accesses move less in the same time
  for (const auto& entry : copy.entries) {
    moving_ns += static_cast<double>(entry.row_bytes() * copy.plan.blocks) * kVectorBytes / access_bytes(entry);
  }
  const auto calls = static_cast<double>(launches(copy));
  auto made =
      sum(launches(copy), 0, calls * costs.launch_ns, calls * costs.kernel_start_ns + moving_ns / costs.kernel_rate);
  made.cost *= kOfMultiprocessors;
  return made;
}

kvswap_estimate of_staged(const Copy& copy, const kvswap_costs& costs) {
  const int64_t chunks = pieces(copy.plan.blocks, blocks_in_staging(block_bytes(copy.entries)));
  const int64_t gathers =
      launches(copy) + (chunks - 1) * pieces(static_cast<int64_t>(copy.entries.size()), kKernelEntries);
  // Host blocks that are neighbours are one copy; the staging memory has them in order of the sources.
  const auto transfers = static_cast<int64_t>(copy.plan.runs.size()) + chunks - 1;
  const auto thread_ns =
      static_cast<double>(gathers) * costs.launch_ns + static_cast<double>(transfers) * costs.call_ns;
  const auto gpu_ns = static_cast<double>(gathers) * costs.kernel_start_ns +
                      static_cast<double>(transfers) * costs.copy_ns +
                      bytes_of(copy) * (1 / costs.gather_rate + 1 / costs.engine_rate);
  return sum(gathers + transfers, 0, thread_ns, gpu_ns);
}

bool can(const Copy& copy, int path) {
  if (path == KVSWAP_PATH_BATCH) return copy.driver.copy_batch != nullptr;
  if (path == KVSWAP_PATH_KERNEL) return fits_kernel(copy);
  if (path == KVSWAP_PATH_STAGED) return fits_kernel(copy) && fits_staging(copy);
  return path == KVSWAP_PATH_RUNS;
}

}  // namespace

kvswap_costs costs_of(bool to_device) {
  const std::lock_guard<std::mutex> lock(costs_mutex);
  return current[to_device ? 1 : 0];
}

void set_costs(bool to_device, const kvswap_costs& costs) {
  const auto* numbers = reinterpret_cast<const double*>(&costs);
  for (size_t i = 0; i < sizeof(costs) / sizeof(double); ++i) {
    if (!std::isfinite(numbers[i]) || numbers[i] <= 0) {
      refuse("number %zu of the costs is %g: all must be positive", i, numbers[i]);
    }
  }
  const std::lock_guard<std::mutex> lock(costs_mutex);
  current[to_device ? 1 : 0] = costs;
}

int allowed_paths() { return allowed.load(); }
void allow_paths(int paths) {
  if ((paths & ~kEveryPath) != 0) refuse("%#x is no set of CUDA's paths", static_cast<unsigned>(paths));
  allowed.store(paths);
}
void forbid_path(int path) { allowed.fetch_and(~(1 << path)); }

kvswap_estimate estimate(const Copy& copy, int path) {
  if (!can(copy, path)) return {0, 0, 0, 0, kImpossible};
  const kvswap_costs costs = costs_of(copy.to_device);
  if (path == KVSWAP_PATH_BATCH) return of_batch(copy, costs);
  if (path == KVSWAP_PATH_KERNEL) return of_kernel(copy, costs);
  if (path == KVSWAP_PATH_STAGED) return of_staged(copy, costs);
  return of_runs(copy, costs);
}

int choose_path(const Copy& copy) {
  int best = KVSWAP_PATH_RUNS, bounded = KVSWAP_PATH_AUTO;
  double best_cost = kImpossible, bounded_cost = kImpossible;
  for (int path : kPaths) {
    if ((allowed_paths() & 1 << path) == 0) continue;
    const kvswap_estimate made = estimate(copy, path);
    if (made.cost < best_cost) best = path, best_cost = made.cost;
    if (made.calls <= kMostCalls && made.cost < bounded_cost) bounded = path, bounded_cost = made.cost;
  }
  return bounded != KVSWAP_PATH_AUTO ? bounded : best;
}

}  // namespace kvswap::cuda
