// A FIFO of work with a thread of its own, and the events recorded in it.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "error.h"

namespace kvswap {

// A point in a queue. Happens once.
class Event {
 public:
  void happen(int64_t failure);
  // Forever for a negative timeout.
  bool wait(int64_t timeout_ns) const;
  // Both only after `wait` said so.
  int64_t failure() const { return failure_; }
  int64_t time_ns() const { return time_ns_; }

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::atomic<bool> happened_{false};
  int64_t failure_ = 0;
  int64_t time_ns_ = 0;
};

class Queue {
 public:
  // Is told whether its unit has failed already; says what failed, 0 for nothing.
  using Work = std::function<int64_t(bool failed)>;

  explicit Queue(const std::string& name);
  // All posting may come from any thread. Throws after `close`.
  void begin();
  void run(Work work);
  void wait(std::shared_ptr<const Event> event, bool needs_data);
  std::shared_ptr<const Event> record();
  // Finishes what was posted. Must not be called from the queue's own thread, nor twice.
  void close();
  // Whether the calling thread is the queue's. Not once `close` was called.
  bool runs_here() const { return thread_.get_id() == std::this_thread::get_id(); }

 private:
  using Step = std::function<void()>;
  void post(Step step);
  void loop();

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Step> steps_;
  bool closed_ = false;
  int64_t failure_ = 0;  // of the current unit; only the queue's thread touches it
  std::thread thread_;
};

}  // namespace kvswap

struct kvswap_event {
  std::shared_ptr<const kvswap::Event> event;
};
