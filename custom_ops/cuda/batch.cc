// cuMemcpyBatchAsync, in pieces that drivers are known to take.
#include <algorithm>
#include <vector>

#include "paths.h"

namespace kvswap::cuda {
namespace {

struct Copies {
  std::vector<DevicePointer> targets, sources;
  std::vector<size_t> sizes;
};

// The driver does not merge neighbours, so a range that is dense on both sides is one copy.
Copies list_copies(const Entries& entries, const Plan& plan) {
  Copies copies;
  for (const auto& entry : entries) {
    const bool dense = entry.is_dense();
    for (const auto& run : plan.runs) {
      const int64_t pieces = dense ? 1 : run.blocks;
      for (int64_t i = 0; i < pieces; ++i) {
        copies.targets.push_back(entry.target_row(run.target + i));
        copies.sources.push_back(entry.source_row(run.source + i));
        copies.sizes.push_back(static_cast<size_t>(entry.row_bytes() * (dense ? run.blocks : 1)));
      }
    }
  }
  return copies;
}

}  // namespace

bool submit_batches(const Driver& driver, std::vector<DevicePointer>& targets, std::vector<DevicePointer>& sources,
                    std::vector<size_t>& sizes, Stream stream) {
  MemcpyAttributes attributes{};
  attributes.source_access = kInStreamOrder;
  size_t attributes_from = 0;
  for (size_t first = 0; first < sizes.size(); first += kBatchCopies) {
    const size_t count = std::min<size_t>(kBatchCopies, sizes.size() - first);
    size_t failed = 0;
    const Result result = driver.copy_batch(targets.data() + first, sources.data() + first, sizes.data() + first, count,
                                            &attributes, &attributes_from, 1, &failed, stream);
    if (result == kNotSupported && first == 0) return false;
    check(driver, result, "cuMemcpyBatchAsync");
  }
  return true;
}

bool copy_by_batch(const Copy& copy) {
  Copies copies = list_copies(copy.entries, copy.plan);
  return submit_batches(copy.driver, copies.targets, copies.sources, copies.sizes, copy.stream);
}

}  // namespace kvswap::cuda
