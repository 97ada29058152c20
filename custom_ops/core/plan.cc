#include "plan.h"

#include <algorithm>
#include <numeric>

namespace kvswap {
namespace {

constexpr int64_t kMaxRows = int64_t{1} << 40;  // far beyond any cache, and no sum of two overflows

void check_run(const kvswap_run& run) {
  if (run.source < 0 || run.target < 0 || run.blocks < 1 || run.source > kMaxRows || run.target > kMaxRows ||
      run.blocks > kMaxRows) {
    refuse("a run of %lld blocks from slot %lld to slot %lld is not possible", static_cast<long long>(run.blocks),
           static_cast<long long>(run.source), static_cast<long long>(run.target));
  }
}

void check_targets(const std::vector<kvswap_run>& runs) {
  std::vector<std::pair<int64_t, int64_t>> written;
  written.reserve(runs.size());
  for (const auto& run : runs) written.emplace_back(run.target, run.target + run.blocks);
  std::sort(written.begin(), written.end());
  for (size_t i = 1; i < written.size(); ++i) {
    if (written[i].first < written[i - 1].second) {
      refuse("target slot %lld is written twice", static_cast<long long>(written[i].first));
    }
  }
}

// Copies with two pitches go forwards, and their rows do not meet.
bool continues(const Grid& grid, const kvswap_run& run) {
  if (run.blocks != grid.blocks) return false;
  const int64_t source_step = run.source - (grid.source + (grid.count - 1) * grid.source_step);
  const int64_t target_step = run.target - (grid.target + (grid.count - 1) * grid.target_step);
  if (grid.count > 1) return source_step == grid.source_step && target_step == grid.target_step;
  return source_step >= run.blocks && target_step >= run.blocks;
}

}  // namespace

Plan checked_plan(std::vector<kvswap_run> runs) {
  Plan plan;
  for (const auto& run : runs) {
    check_run(run);
    plan.source_end = std::max(plan.source_end, run.source + run.blocks);
    plan.target_end = std::max(plan.target_end, run.target + run.blocks);
  }
  check_targets(runs);
  for (const auto& run : runs) plan.blocks += run.blocks;  // of runs that do not overlap: no overflow
  plan.grids = grids_of(runs);
  plan.runs = std::move(runs);
  return plan;
}

std::vector<Grid> grids_of(const std::vector<kvswap_run>& runs) {
  std::vector<Grid> grids;
  for (const auto& run : runs) {
    if (!grids.empty() && continues(grids.back(), run)) {
      Grid& last = grids.back();
      if (last.count == 1) {
        last.source_step = run.source - last.source;
        last.target_step = run.target - last.target;
      }
      ++last.count;
    } else {
      grids.push_back({run.source, run.target, run.blocks, 1, 0, 0});
    }
  }
  return grids;
}

std::vector<kvswap_run> coalesce(const int64_t* sources, const int64_t* targets, int64_t count) {
  if (count < 0 || (count > 0 && (sources == nullptr || targets == nullptr))) refuse("a plan needs its slots");
  std::vector<int64_t> order(static_cast<size_t>(count));
  std::iota(order.begin(), order.end(), 0);
  std::sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return std::make_pair(sources[a], targets[a]) < std::make_pair(sources[b], targets[b]);
  });
  std::vector<kvswap_run> runs;
  for (int64_t i : order) {
    check_run({sources[i], targets[i], 1});
    if (!runs.empty() && runs.back().source + runs.back().blocks == sources[i] &&
        runs.back().target + runs.back().blocks == targets[i]) {
      ++runs.back().blocks;
    } else {
      runs.push_back({sources[i], targets[i], 1});
    }
  }
  return runs;
}

}  // namespace kvswap

using kvswap::guarded;

int kvswap_plan_slots(const int64_t* sources, const int64_t* targets, int64_t count, kvswap_plan** plan) {
  return guarded([&] {
    auto checked = kvswap::checked_plan(kvswap::coalesce(sources, targets, count));
    *plan = new kvswap_plan{std::make_shared<const kvswap::Plan>(std::move(checked))};
  });
}

int kvswap_plan_runs(const kvswap_run* runs, int64_t count, kvswap_plan** plan) {
  return guarded([&] {
    if (count < 0 || (count > 0 && runs == nullptr)) kvswap::refuse("a plan needs its runs");
    auto checked = kvswap::checked_plan(std::vector<kvswap_run>(runs, runs + count));
    *plan = new kvswap_plan{std::make_shared<const kvswap::Plan>(std::move(checked))};
  });
}

int64_t kvswap_plan_size(const kvswap_plan* plan) { return static_cast<int64_t>(plan->plan->runs.size()); }
const kvswap_run* kvswap_plan_data(const kvswap_plan* plan) { return plan->plan->runs.data(); }
void kvswap_plan_free(kvswap_plan* plan) { delete plan; }
