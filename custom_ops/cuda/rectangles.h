// A plan as driver calls: every grid of an entry is as few copies with two pitches as it can be.
#pragma once

#include <algorithm>

#include "../core/plan.h"
#include "driver_types.h"

namespace kvswap::cuda {

// `rows` ranges of `width` bytes each, the pitches apart. One row: a plain range.
struct Rectangle {
  uint64_t source, target;
  int64_t width, rows;
  int64_t source_pitch, target_pitch;
};

inline bool fits_2d(int64_t source_pitch, int64_t target_pitch) {
  return source_pitch <= kMaxPitch && target_pitch <= kMaxPitch;
}

// Calls visit(Rectangle) for all of `entry`. A grid of n runs of m blocks is one rectangle where its blocks are
// neighbours on both sides, else min(n, m); pitches that a 2D copy does not take cost more.
template <typename Visit>
void for_each_rectangle(const Entry& entry, const Plan& plan, Visit visit) {
  const int64_t source_pitch = entry.source.pitch, target_pitch = entry.target.pitch, width = entry.row_bytes();
  const bool dense = entry.is_dense(), rows_fit = fits_2d(source_pitch, target_pitch);
  for (const auto& grid : plan.grids) {
    const int64_t source_step = grid.source_step * source_pitch, target_step = grid.target_step * target_pitch;
    const bool steps_fit = fits_2d(source_step, target_step);
    const uint64_t source = entry.source_row(grid.source), target = entry.target_row(grid.target);
    const auto at = [](uint64_t base, int64_t offset) { return base + static_cast<uint64_t>(offset); };
    if (dense || grid.blocks == 1) {
      const int64_t range = width * grid.blocks;
      if (grid.count == 1 || steps_fit) {
        visit(Rectangle{source, target, range, grid.count, source_step, target_step});
        continue;
      }
      for (int64_t i = 0; i < grid.count; ++i) {
        visit(Rectangle{at(source, i * source_step), at(target, i * target_step), range, 1, range, range});
      }
    } else if (steps_fit && grid.count > grid.blocks) {  // across the runs
      for (int64_t i = 0; i < grid.blocks; ++i) {
        visit(Rectangle{at(source, i * source_pitch), at(target, i * target_pitch), width, grid.count, source_step,
                        target_step});
      }
    } else {
      for (int64_t i = 0; i < grid.count; ++i) {
        const uint64_t of = at(source, i * source_step), to = at(target, i * target_step);
        if (rows_fit) {
          visit(Rectangle{of, to, width, grid.blocks, source_pitch, target_pitch});
          continue;
        }
        for (int64_t j = 0; j < grid.blocks; ++j) {
          visit(Rectangle{at(of, j * source_pitch), at(to, j * target_pitch), width, 1, width, width});
        }
      }
    }
  }
}

}  // namespace kvswap::cuda
