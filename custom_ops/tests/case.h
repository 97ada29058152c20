// A random copy: memory of both sides with guard bytes, the rows in it, a slot list, and what must come out.
#pragma once

#include <algorithm>
#include <numeric>

#include "expect.h"

struct Side {
  std::vector<uint8_t> memory;
  std::vector<kvswap_rows> rows;

  uint8_t* row(size_t entry, int64_t slot) {
    return reinterpret_cast<uint8_t*>(rows[entry].address) + slot * rows[entry].pitch;
  }
};

struct Case {
  Side target, source;
  std::vector<int64_t> targets, sources;
  std::vector<uint8_t> expected;  // the whole target memory, guards and untouched rows included

  int64_t entries() const { return static_cast<int64_t>(target.rows.size()); }

  void check() const { EXPECT(target.memory == expected); }
};

constexpr size_t kGuard = 64;

// Dense: one tensor after the other. Block-major: the entries of one block lie together.
inline Side make_side(Random& random, const std::vector<int64_t>& widths, int64_t slots, bool block_major,
                      size_t shift) {
  Side side;
  const int64_t block = std::accumulate(widths.begin(), widths.end(), int64_t{0});
  side.memory.resize(kGuard + shift + static_cast<size_t>(block * slots) + kGuard);
  for (auto& byte : side.memory) byte = static_cast<uint8_t>(random());
  uint64_t address = reinterpret_cast<uint64_t>(side.memory.data()) + kGuard + shift;
  for (int64_t width : widths) {
    side.rows.push_back({address, slots, width, block_major ? block : width});
    address += static_cast<uint64_t>(block_major ? width : width * slots);
  }
  return side;
}

inline Case make_case(Random& random, bool to_host, bool aligned, int64_t most_width) {
  Case made;
  std::vector<int64_t> widths(static_cast<size_t>(pick(random, 1, 12)));
  for (auto& width : widths) width = aligned ? 16 * pick(random, 1, most_width / 16) : pick(random, 1, most_width);
  const int64_t source_slots = pick(random, 1, 40), target_slots = pick(random, 1, 40);
  const size_t shift = aligned ? 0 : static_cast<size_t>(pick(random, 0, 15));
  made.target = make_side(random, widths, target_slots, to_host, shift);
  made.source = make_side(random, widths, source_slots, !to_host, shift);
  std::vector<int64_t> all(static_cast<size_t>(target_slots));
  std::iota(all.begin(), all.end(), 0);
  if (pick(random, 0, 1) == 0) std::shuffle(all.begin(), all.end(), random);
  all.resize(static_cast<size_t>(pick(random, 0, target_slots)));
  made.targets = all;
  const int64_t first = pick(random, 0, source_slots - 1);
  for (size_t i = 0; i < all.size(); ++i) {
    const bool in_order = pick(random, 0, 3) != 0;
    made.sources.push_back(in_order ? (first + static_cast<int64_t>(i)) % source_slots
                                    : pick(random, 0, source_slots - 1));
  }
  std::vector<uint8_t> before = made.target.memory;
  for (size_t entry = 0; entry < widths.size(); ++entry) {
    for (size_t i = 0; i < made.targets.size(); ++i) {
      std::memcpy(made.target.row(entry, made.targets[i]), made.source.row(entry, made.sources[i]),
                  static_cast<size_t>(widths[entry]));
    }
  }
  made.expected = made.target.memory;
  std::copy(before.begin(), before.end(), made.target.memory.begin());
  return made;
}

inline kvswap_plan* make_plan(const Case& made) {
  kvswap_plan* plan = nullptr;
  EXPECT(kvswap_plan_slots(made.sources.data(), made.targets.data(), static_cast<int64_t>(made.targets.size()),
                           &plan) == KVSWAP_OK);
  return plan;
}
