#include "machine.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>

namespace fake {
namespace {

constexpr uint64_t kLegacy = 1;

uint64_t normal(uint64_t handle) { return handle == 0 ? kLegacy : handle; }

}  // namespace

Machine& machine() {
  // Never destroyed: streams may be asked while the process ends.
  static auto* one = new Machine;
  return *one;
}

Machine::Machine() { streams_[kLegacy] = {true, {}}; }

// ---- errors

Result Machine::enter() { return sticky_; }

Result Machine::refuse(Result result, const std::string& text) {
  faults.push_back(text);
  return result;
}

void Machine::fault(Result sticky, const std::string& text) {
  faults.push_back(text);
  if (sticky_ != kSuccess) return;
  sticky_ = sticky;
  for (auto& [handle, stream] : streams_) stream.queue.clear();
}

// ---- handles

uint64_t Machine::new_stream(bool is_blocking) {
  const uint64_t handle = next_handle_ += 16;
  streams_[handle] = {is_blocking, {}};
  return handle;
}

Result Machine::end_stream(uint64_t handle) {
  if (stream_of(handle) == nullptr || normal(handle) == kLegacy) return kInvalidHandle;
  streams_.at(handle).has_ended = true;
  return kSuccess;
}

uint64_t Machine::new_event(bool is_timed) {
  const uint64_t handle = next_handle_ += 16;
  events_[handle] = std::make_shared<Event>(Event{is_timed});
  return handle;
}

Result Machine::end_event(uint64_t handle) { return events_.erase(handle) == 1 ? kSuccess : kInvalidHandle; }

std::shared_ptr<Event> Machine::event_of(uint64_t handle) {
  const auto found = events_.find(handle);
  return found == events_.end() ? nullptr : found->second;
}

Stream* Machine::stream_of(uint64_t handle) {
  const auto found = streams_.find(normal(handle));
  return found == streams_.end() || found->second.has_ended ? nullptr : &found->second;
}

// ---- submission

Operation Machine::recording(const std::shared_ptr<Event>& event) {
  return {Operation::kRecord, nullptr, {}, 0, event, ++event->recorded};
}

// The legacy stream waits for all blocking streams, and they for it.
void Machine::order_with_legacy(uint64_t handle) {
  const auto join = [&](Stream& before, Stream& after) {
    if (before.queue.empty()) return;
    const auto event = std::make_shared<Event>(Event{false});
    before.queue.push_back(recording(event));
    after.queue.push_back({Operation::kWait, nullptr, {}, 0, event, event->recorded});
  };
  Stream& own = streams_.at(handle);
  if (handle == kLegacy) {
    for (auto& [other, stream] : streams_) {
      if (other != kLegacy && stream.is_blocking) join(stream, own);
    }
  } else if (own.is_blocking) {
    join(streams_.at(kLegacy), own);
  }
}

void Machine::push(uint64_t handle, Operation operation) {
  handle = normal(handle);
  if (operation.kind == Operation::kWork) {
    operation.order.resize(operation.work->pieces);
    std::iota(operation.order.begin(), operation.order.end(), size_t{0});
    if (!operation.work->is_ordered) std::shuffle(operation.order.begin(), operation.order.end(), random_);
  }
  Stream& stream = streams_.at(handle);
  while (stream.queue.size() >= depth_ && tick()) {
  }
  if (sticky_ != kSuccess) return;
  order_with_legacy(handle);
  stream.queue.push_back(std::move(operation));
}

Result Machine::submit(uint64_t handle, Work work) {
  if (stream_of(handle) == nullptr) return refuse(kInvalidHandle, "work for a stream that is not there");
  Operation operation{Operation::kWork, std::make_shared<const Work>(std::move(work)), {}, 0, nullptr, 0};
  push(handle, std::move(operation));
  return sticky_;
}

Result Machine::record(uint64_t handle, uint64_t stream) {
  const auto event = event_of(handle);
  if (event == nullptr || stream_of(stream) == nullptr) return refuse(kInvalidHandle, "record of nothing");
  push(stream, recording(event));
  return sticky_;
}

Result Machine::wait(uint64_t stream, uint64_t handle) {
  const auto event = event_of(handle);
  if (event == nullptr || stream_of(stream) == nullptr) return refuse(kInvalidHandle, "wait for nothing");
  push(stream, {Operation::kWait, nullptr, {}, 0, event, event->recorded});
  return sticky_;
}

// ---- progress

void Machine::shuffle() {
  priority_.clear();
  for (auto each = streams_.begin(); each != streams_.end();) {
    if (each->second.has_ended && each->second.queue.empty()) {
      each = streams_.erase(each);
    } else {
      priority_.push_back((each++)->first);
    }
  }
  std::shuffle(priority_.begin(), priority_.end(), random_);
}

bool Machine::can_run(const Stream& stream) const {
  if (stream.queue.empty()) return false;
  const Operation& head = stream.queue.front();
  return head.kind != Operation::kWait || head.event->done >= head.version;
}

// Streams run by priorities that last for a while: one that is far behind finds more than a fair turn for everybody.
bool Machine::tick() {
  if (is_running_) return false;
  if (priority_.size() != streams_.size() || random(patience_) == 0) shuffle();
  for (const uint64_t handle : priority_) {
    Stream& stream = streams_.at(handle);
    if (can_run(stream)) return run_turn(stream), true;
  }
  return false;
}

void Machine::run_turn(Stream& stream) {
  Operation& head = stream.queue.front();
  ++clock_;
  if (head.kind == Operation::kRecord) {
    head.event->done = std::max(head.event->done, head.version);
    head.event->time = clock_;
  }
  if (head.kind == Operation::kWork) {
    const size_t left = head.order.size() - head.next;
    size_t turns = left == 0 ? 0 : 1 + random(left);
    while (turns-- > 0) {
      const auto work = head.work;
      is_running_ = true;
      const Result result = work->run(head.order[head.next]);
      is_running_ = false;
      if (result != kSuccess || sticky_ != kSuccess) return fault(result, "work failed");
      ++head.next;
    }
    if (head.next < head.order.size()) return;
  }
  stream.queue.pop_front();
}

size_t Machine::pending() const {
  size_t sum = 0;
  for (const auto& [handle, stream] : streams_) sum += stream.queue.size();
  return sum;
}

void Machine::run_all() {
  while (tick()) {
  }
  if (pending() != 0) {  // a wait means an earlier record, so that this cannot be
    std::fprintf(stderr, "the fake GPU's streams wait for each other\n");
    std::abort();
  }
}

// ---- questions

Result Machine::query_event(uint64_t handle) {
  if (const Result result = enter(); result != kSuccess) return result;
  const auto event = event_of(handle);
  if (event == nullptr) return kInvalidHandle;
  for (uint64_t turns = random(max_progress_); turns > 0; --turns) tick();
  if (sticky_ != kSuccess) return sticky_;
  return event->done >= event->recorded ? kSuccess : kNotReady;
}

Result Machine::query_stream(uint64_t handle) {
  if (const Result result = enter(); result != kSuccess) return result;
  const Stream* stream = stream_of(handle);
  if (stream == nullptr) return kInvalidHandle;
  return stream->queue.empty() ? kSuccess : kNotReady;
}

Result Machine::synchronize_event(uint64_t handle) {
  if (const Result result = enter(); result != kSuccess) return result;
  const auto event = event_of(handle);
  if (event == nullptr) return kInvalidHandle;
  const uint64_t version = event->recorded;
  while (event->done < version && sticky_ == kSuccess && tick()) {
  }
  return sticky_;
}

Result Machine::synchronize_stream(uint64_t handle) {
  if (const Result result = enter(); result != kSuccess) return result;
  if (stream_of(handle) == nullptr) return kInvalidHandle;
  if (normal(handle) == kLegacy) order_with_legacy(kLegacy);
  while (sticky_ == kSuccess && !streams_.at(normal(handle)).queue.empty() && tick()) {
  }
  return sticky_;
}

Result Machine::elapsed(float* milliseconds, uint64_t start, uint64_t end) {
  const auto first = event_of(start), last = event_of(end);
  if (first == nullptr || last == nullptr || !first->is_timed || !last->is_timed) return kInvalidHandle;
  if (first->recorded == 0 || last->recorded == 0) return kInvalidHandle;
  if (first->done < first->recorded || last->done < last->recorded) return kNotReady;
  *milliseconds = static_cast<float>(last->time - first->time);
  return kSuccess;
}

}  // namespace fake
