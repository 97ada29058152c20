// A checked, coalesced slot list, and the check of a copy's rows against it.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "error.h"

namespace kvswap {

// `count` runs of `blocks` blocks each: their sources lie `source_step` slots apart, their targets `target_step`.
struct Grid {
  int64_t source, target, blocks;
  int64_t count, source_step, target_step;
};

struct Plan {
  std::vector<kvswap_run> runs;
  std::vector<Grid> grids;  // the same copies: runs at equal distances are one
  int64_t blocks = 0;
  int64_t source_end = 0;  // one past the last row that is read
  int64_t target_end = 0;  // one past the last row that is written
};

// One (layer, role): where its rows are on either side.
struct Entry {
  kvswap_rows target;
  kvswap_rows source;

  bool is_dense() const { return target.pitch == target.row_bytes && source.pitch == source.row_bytes; }
  int64_t row_bytes() const { return target.row_bytes; }
  uint64_t target_row(int64_t row) const { return target.address + static_cast<uint64_t>(row * target.pitch); }
  uint64_t source_row(int64_t row) const { return source.address + static_cast<uint64_t>(row * source.pitch); }
};

using Entries = std::vector<Entry>;
using PlanPointer = std::shared_ptr<const Plan>;

// Throws for negative or huge numbers, empty runs and targets that are written twice.
Plan checked_plan(std::vector<kvswap_run> runs);
// Joins runs of one length that follow each other at equal distances on both sides. O(runs).
std::vector<Grid> grids_of(const std::vector<kvswap_run>& runs);
// The fewest runs that copy sources[i] to targets[i], in the order of their sources.
std::vector<kvswap_run> coalesce(const int64_t* sources, const int64_t* targets, int64_t count);

// The rows of both sides, once it is certain that the plan stays inside them and that no byte is both read and
// written, or written twice.
Entries checked_entries(const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries, const Plan& plan);

}  // namespace kvswap

struct kvswap_plan {
  kvswap::PlanPointer plan;
};

namespace kvswap {
inline const PlanPointer& plan_of(const kvswap_plan* plan) {
  if (plan == nullptr) refuse("a copy needs a plan");
  return plan->plan;
}
}  // namespace kvswap
