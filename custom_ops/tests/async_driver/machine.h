// The fake GPU: streams are FIFOs that only move when somebody asks for progress, in an order that a seed decides.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "memory.h"

namespace fake {

using Result = int;
enum : Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidDevice = 101,
  kInvalidContext = 201,
  kPeerUnsupported = 217,
  kNotFound = 500,
  kNotPermitted = 800,
  kNotReady = 600,
  kInvalidHandle = 400,
  kIllegalAddress = 700,
  kLaunchFailed = 719,
};

// A record names the point it was made at: a wait or a query means the latest record at the time of its call.
struct Event {
  bool is_timed;
  uint64_t recorded = 0, done = 0;  // how many records were submitted, and how many have run
  uint64_t time = 0;                // pieces that had run by then, on all streams
};

// Work that runs piece by piece, so that other streams get between two rows of one copy.
struct Work {
  size_t pieces;
  bool is_ordered;
  std::function<Result(size_t)> run;
};

struct Operation {
  enum Kind { kWork, kRecord, kWait } kind;
  std::shared_ptr<const Work> work;
  std::vector<size_t> order;
  size_t next = 0;
  std::shared_ptr<Event> event;
  uint64_t version = 0;
};

struct Stream {
  bool is_blocking;
  std::deque<Operation> queue;
  bool has_ended = false;  // what was submitted still runs
};

class Machine {
 public:
  Machine();

  // ---- for callers of the driver: every one of them fails once the context is broken
  Result enter();  // the sticky error, or success
  uint64_t new_stream(bool is_blocking);
  Result end_stream(uint64_t handle);
  uint64_t new_event(bool is_timed);
  Result end_event(uint64_t handle);
  Result submit(uint64_t stream, Work work);
  Result record(uint64_t event, uint64_t stream);
  Result wait(uint64_t stream, uint64_t event);
  Result query_event(uint64_t event);
  Result query_stream(uint64_t stream);
  Result synchronize_event(uint64_t event);
  Result synchronize_stream(uint64_t stream);
  Result elapsed(float* milliseconds, uint64_t start, uint64_t end);

  // ---- for tests
  bool tick();  // one turn of one stream; false when nothing can run
  void run_all();
  void fault(Result sticky, const std::string& text);
  Result refuse(Result result, const std::string& text);
  uint64_t random(uint64_t below) { return random_() % below; }

  Memory memory;
  std::vector<std::string> faults;

 private:
  size_t pending() const;
  std::shared_ptr<Event> event_of(uint64_t handle);
  Stream* stream_of(uint64_t handle);
  void push(uint64_t handle, Operation operation);
  void order_with_legacy(uint64_t handle);
  Operation recording(const std::shared_ptr<Event>& event);
  bool can_run(const Stream& stream) const;
  void run_turn(Stream& stream);
  void shuffle();

  std::mt19937_64 random_;
  size_t depth_ = 64;
  uint64_t max_progress_ = 4;  // turns that a query may let pass
  uint64_t patience_ = 24;     // turns until other streams go first, on average
  bool is_running_ = false;    // a kernel's body: it must not come back here for more
  uint64_t next_handle_ = 0x7700, clock_ = 0;
  Result sticky_ = kSuccess;
  std::map<uint64_t, Stream> streams_;
  std::map<uint64_t, std::shared_ptr<Event>> events_;
  std::vector<uint64_t> priority_;
};

Machine& machine();

}  // namespace fake
