#include "copy.h"

#include <algorithm>
#include <cstring>

#include "stream_copy.h"

namespace kvswap {
namespace {

// Non-temporal stores pay for ranges that leave the caches anyway: long ones, in a copy larger than a core's own cache.
constexpr int64_t kStreamRange = 8 << 10;
constexpr int64_t kStreamCopy = 512 << 10;

using CopyRange = void (*)(void* to, const void* of, size_t nbytes);

void plain_copy(void* to, const void* of, size_t nbytes) { std::memcpy(to, of, nbytes); }

bool streams(const Entry& entry, const Plan& plan, int64_t total_bytes, int path) {
  if (path != KVSWAP_PATH_AUTO) return path == KVSWAP_PATH_STREAM;
  int64_t range = entry.row_bytes();
  if (entry.is_dense()) range *= std::max<int64_t>(1, plan.blocks / static_cast<int64_t>(plan.runs.size()));
  return total_bytes >= kStreamCopy && range >= kStreamRange;
}

void copy_entry(const Entry& entry, const Plan& plan, CopyRange copy) {
  const int64_t width = entry.row_bytes();
  const bool dense = entry.is_dense();
  for (const auto& run : plan.runs) {
    const int64_t pieces = dense ? 1 : run.blocks;
    const int64_t piece = dense ? width * run.blocks : width;
    for (int64_t i = 0; i < pieces; ++i) {
      copy(reinterpret_cast<void*>(entry.target_row(run.target + i)),
           reinterpret_cast<const void*>(entry.source_row(run.source + i)), static_cast<size_t>(piece));
    }
  }
}

}  // namespace

void check_cpu_path(int path) {
  if (path < KVSWAP_PATH_AUTO || path > KVSWAP_PATH_STREAM) refuse("path %d is not one of the CPU's", path);
}

void copy_entries(const Entries& entries, const Plan& plan, int path) noexcept {
  if (plan.runs.empty()) return;
  int64_t total_bytes = 0;
  for (const auto& entry : entries) total_bytes += entry.row_bytes() * plan.blocks;
  const CopyRange stream = stream_copy_of_this_cpu();
  for (const auto& entry : entries) {
    copy_entry(entry, plan, streams(entry, plan, total_bytes, path) ? stream : plain_copy);
  }
  finish_stream_copies();
}

}  // namespace kvswap

int kvswap_copy(const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries, const kvswap_plan* plan,
                int path) {
  return kvswap::guarded([&] {
    kvswap::check_cpu_path(path);
    const auto& checked_plan = kvswap::plan_of(plan);
    kvswap::copy_entries(kvswap::checked_entries(targets, sources, entries, *checked_plan), *checked_plan, path);
  });
}
