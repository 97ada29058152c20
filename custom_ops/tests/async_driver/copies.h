// Copies of rows: what the driver checks when they are submitted, and what they do when they run.
#pragma once

#include <vector>

#include "machine.h"

namespace fake {

struct Row {
  uint64_t target, source;
  size_t width;
};

// CUmemcpySrcAccessOrder: when the source may be read.
enum Access : int { kInStreamOrder = 1, kDuringCall = 2, kAny = 3 };

Result submit_copy(uint64_t stream, std::vector<Row> rows, bool is_ordered, Access access);

}  // namespace fake
