// The check of a copy's rows: inside their memory, of one size, and without overlap.
#include <algorithm>

#include "plan.h"

namespace kvswap {
namespace {

constexpr uint64_t kAddressEnd = uint64_t{1} << 63;

long long shown(int64_t value) { return static_cast<long long>(value); }

uint64_t end_of(const kvswap_rows& rows) {
  return rows.address + static_cast<uint64_t>((rows.num_rows - 1) * rows.pitch + rows.row_bytes);
}

void check_rows(const kvswap_rows& rows) {
  if (rows.address == 0 || rows.num_rows < 1 || rows.row_bytes < 1 || rows.pitch < rows.row_bytes) {
    refuse("%lld rows of %lld bytes, %lld apart, at address %#llx are not memory", shown(rows.num_rows),
           shown(rows.row_bytes), shown(rows.pitch), static_cast<unsigned long long>(rows.address));
  }
  int64_t span = 0;
  if (__builtin_mul_overflow(rows.num_rows, rows.pitch, &span) ||
      rows.address >= kAddressEnd - static_cast<uint64_t>(span)) {
    refuse("%lld rows, %lld bytes apart, do not fit the address space", shown(rows.num_rows), shown(rows.pitch));
  }
}

// Rows of one pitch may interleave, as the roles of a block do in the block-major host pool.
bool overlap(const kvswap_rows& a, const kvswap_rows& b) {
  if (end_of(a) <= b.address || end_of(b) <= a.address) return false;
  if (a.pitch != b.pitch) return true;
  const auto& low = a.address <= b.address ? a : b;
  const auto& high = a.address <= b.address ? b : a;
  auto offset = static_cast<int64_t>((high.address - low.address) % static_cast<uint64_t>(a.pitch));
  return offset < low.row_bytes || a.pitch - offset < high.row_bytes;
}

// Only entries whose spans meet are compared, so dense tensors cost a sort and the host pool a square.
void check_targets(const Entries& entries) {
  std::vector<const kvswap_rows*> sorted;
  sorted.reserve(entries.size());
  for (const auto& entry : entries) sorted.push_back(&entry.target);
  std::sort(sorted.begin(), sorted.end(), [](auto* a, auto* b) { return a->address < b->address; });
  for (size_t i = 0; i < sorted.size(); ++i) {
    for (size_t j = i + 1; j < sorted.size() && sorted[j]->address < end_of(*sorted[i]); ++j) {
      if (overlap(*sorted[i], *sorted[j])) refuse("two of the targets are the same memory");
    }
  }
}

// Sources may be read twice; no byte may be read here and written there.
void check_sides(const Entries& entries) {
  uint64_t source_begin = UINT64_MAX, source_end = 0, target_begin = UINT64_MAX, target_end = 0;
  for (const auto& entry : entries) {
    source_begin = std::min(source_begin, entry.source.address);
    source_end = std::max(source_end, end_of(entry.source));
    target_begin = std::min(target_begin, entry.target.address);
    target_end = std::max(target_end, end_of(entry.target));
  }
  if (source_end <= target_begin || target_end <= source_begin) return;
  for (const auto& to : entries) {
    for (const auto& of : entries) {
      if (overlap(to.target, of.source)) refuse("a copy's source and target are the same memory");
    }
  }
}

}  // namespace

Entries checked_entries(const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries, const Plan& plan) {
  if (entries < 1 || targets == nullptr || sources == nullptr) refuse("a copy needs rows on both sides");
  Entries checked;
  checked.reserve(static_cast<size_t>(entries));
  for (int64_t i = 0; i < entries; ++i) {
    check_rows(targets[i]);
    check_rows(sources[i]);
    if (targets[i].row_bytes != sources[i].row_bytes) {
      refuse("rows of %lld bytes cannot be copied to rows of %lld bytes", shown(sources[i].row_bytes),
             shown(targets[i].row_bytes));
    }
    if (plan.source_end > sources[i].num_rows) {
      refuse("a copy reads row %lld of %lld", shown(plan.source_end - 1), shown(sources[i].num_rows));
    }
    if (plan.target_end > targets[i].num_rows) {
      refuse("a copy writes row %lld of %lld", shown(plan.target_end - 1), shown(targets[i].num_rows));
    }
    checked.push_back({targets[i], sources[i]});
  }
  check_targets(checked);
  check_sides(checked);
  return checked;
}

}  // namespace kvswap
