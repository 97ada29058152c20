#include "copies.h"

#include <cstring>

namespace fake {
namespace {

enum class Place { kDevice, kPinned, kPageable, kNowhere };

Place place_of(uint64_t address, size_t nbytes) {
  const Memory& memory = machine().memory;
  if (memory.is_device(address)) {
    return memory.resolve(address, nbytes, Eyes::kCopy) == nullptr ? Place::kNowhere : Place::kDevice;
  }
  return memory.is_registered(address, nbytes) ? Place::kPinned : Place::kPageable;
}

// One row as it was when the copy was submitted: a page that was locked then has to be locked when it runs.
struct Task {
  Row row;
  bool target_is_pinned, source_is_pinned;
  std::shared_ptr<std::vector<uint8_t>> staged;  // the source was read already
};

Result run_row(const Task& task) {
  Machine& gpu = machine();
  const auto& row = task.row;
  if ((task.target_is_pinned && !gpu.memory.is_registered(row.target, row.width)) ||
      (task.source_is_pinned && task.staged == nullptr && !gpu.memory.is_registered(row.source, row.width))) {
    gpu.fault(kIllegalAddress, "a copy ran after its host memory was given back");
    return kIllegalAddress;
  }
  uint8_t* to = gpu.memory.resolve(row.target, row.width, Eyes::kCopy);
  const uint8_t* of = task.staged ? task.staged->data() : gpu.memory.resolve(row.source, row.width, Eyes::kCopy);
  if (to == nullptr || of == nullptr) {
    gpu.fault(kIllegalAddress, "a copy ran after its device memory was freed");
    return kIllegalAddress;
  }
  std::memmove(to, of, row.width);
  return kSuccess;
}

void stage(Task& task) {
  const uint8_t* of = machine().memory.resolve(task.row.source, task.row.width, Eyes::kCopy);
  task.staged = std::make_shared<std::vector<uint8_t>>(of, of + task.row.width);
}

}  // namespace

Result submit_copy(uint64_t stream, std::vector<Row> rows, bool is_ordered, Access access) {
  Machine& gpu = machine();
  if (const Result result = gpu.enter(); result != kSuccess) return result;
  bool blocks = false;
  std::vector<Task> tasks;
  for (const Row& row : rows) {
    const Place to = place_of(row.target, row.width), of = place_of(row.source, row.width);
    if (to == Place::kNowhere || of == Place::kNowhere) {
      return gpu.refuse(kInvalidValue, "a copy names device memory that is not there");
    }
    if (to != Place::kDevice && of != Place::kDevice) {
      return gpu.refuse(kInvalidValue, "a copy between two host addresses");
    }
    tasks.push_back({row, to == Place::kPinned, of == Place::kPinned, nullptr});
    const bool is_early = access == kDuringCall || (access == kAny && gpu.random(2) == 0);
    if (of == Place::kPageable || is_early) stage(tasks.back());
    blocks = blocks || to == Place::kPageable;
  }
  if (blocks) {
    if (const Result result = gpu.enter(); result != kSuccess) return result;
  }
  const size_t pieces = tasks.size();
  const Result result =
      gpu.submit(stream, {pieces, is_ordered, [tasks](size_t piece) { return run_row(tasks[piece]); }});
  return result == kSuccess && blocks ? gpu.synchronize_stream(stream) : result;
}

}  // namespace fake
