#include "queue.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <utility>

namespace kvswap {
namespace {
constexpr int64_t kLongestWait = int64_t{1} << 60;  // 36 years: added to the time of day it still is an int64
}

void Event::happen(int64_t failure) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    failure_ = failure;
    time_ns_ = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
                   .count();
    happened_.store(true, std::memory_order_release);
  }
  changed_.notify_all();
}

bool Event::wait(int64_t timeout_ns) const {
  if (happened_.load(std::memory_order_acquire)) return true;
  if (timeout_ns == 0) return false;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto happened = [this] { return happened_.load(std::memory_order_relaxed); };
  if (timeout_ns < 0) {
    changed_.wait(lock, happened);
    return true;
  }
  // Against the system clock: older thread sanitizers do not know waits on the steady one. A clock that is set
  // meanwhile makes this wait shorter or longer, which callers that wait in short slices do not notice.
  const auto timeout = std::chrono::nanoseconds(std::min(timeout_ns, kLongestWait));
  return changed_.wait_until(lock, std::chrono::system_clock::now() + timeout, happened);
}

Queue::Queue(const std::string& name) : thread_([this] { loop(); }) {
  pthread_setname_np(thread_.native_handle(), name.substr(0, 15).c_str());  // for debuggers; longer names are refused
}

void Queue::begin() {
  post([this] { failure_ = 0; });
}

void Queue::run(Work work) {
  post([this, work = std::move(work)] {
    const int64_t failure = work(failure_ != 0);
    if (failure_ == 0) failure_ = failure;
  });
}

void Queue::wait(std::shared_ptr<const Event> event, bool needs_data) {
  post([this, event = std::move(event), needs_data] {
    event->wait(-1);
    const int64_t failure = event->failure();
    if (needs_data && failure_ == 0) failure_ = failure > 0 ? -failure : failure;
  });
}

std::shared_ptr<const Event> Queue::record() {
  auto event = std::make_shared<Event>();
  post([this, event] { event->happen(failure_); });
  return event;
}

void Queue::close() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Queue::post(Step step) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_) refuse("the queue is closed");
    steps_.push_back(std::move(step));
  }
  changed_.notify_one();
}

void Queue::loop() {
  std::unique_lock<std::mutex> lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closed_ || !steps_.empty(); });
    if (steps_.empty()) return;
    {
      const Step step = std::move(steps_.front());
      steps_.pop_front();
      lock.unlock();
      step();
    }
    lock.lock();
  }
}

}  // namespace kvswap
