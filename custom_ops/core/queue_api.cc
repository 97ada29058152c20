// The C face of the queues: ids instead of pointers, so that a stale or foreign handle is an error and not a crash.
#include <pthread.h>

#include <map>

#include "copy.h"
#include "queue.h"

namespace kvswap {
namespace {

using Queues = std::map<uint64_t, std::shared_ptr<Queue>>;

// Never destroyed: at process exit queue threads may still run.
struct Registry {
  std::mutex mutex;
  Queues* queues = new Queues;
  uint64_t last_id = 0;
  std::atomic<bool> calls_stopped{false};
};

Registry& registry() {
  static auto* instance = [] {
    auto* made = new Registry;
    // A forked child has none of the threads: it forgets the queues, without ending what is not there.
    pthread_atfork([] { registry().mutex.lock(); }, [] { registry().mutex.unlock(); },
                   [] {
                     registry().queues = new Queues;
                     registry().mutex.unlock();
                   });
    return made;
  }();
  return *instance;
}

std::shared_ptr<Queue> queue_of(uint64_t id) {
  std::lock_guard<std::mutex> lock(registry().mutex);
  auto found = registry().queues->find(id);
  if (found == registry().queues->end()) refuse("there is no queue %llu", static_cast<unsigned long long>(id));
  return found->second;
}

const kvswap_event& checked(const kvswap_event* event) {
  if (event == nullptr) refuse("there is no such event");
  return *event;
}

}  // namespace
}  // namespace kvswap

using kvswap::guarded;
using kvswap::queue_of;
using kvswap::registry;

int kvswap_queue_create(const char* name, uint64_t* queue) {
  return guarded([&] {
    auto made = std::make_shared<kvswap::Queue>(name == nullptr ? "" : name);
    std::lock_guard<std::mutex> lock(registry().mutex);
    *queue = ++registry().last_id;
    registry().queues->emplace(*queue, std::move(made));
  });
}

int kvswap_queue_close(uint64_t queue) {
  return guarded([&] {
    auto closing = queue_of(queue);
    {
      std::lock_guard<std::mutex> lock(registry().mutex);
      if (registry().queues->erase(queue) == 0) kvswap::refuse("the queue is being closed already");
    }
    closing->close();
  });
}

int kvswap_queue_begin(uint64_t queue) {
  return guarded([&] { queue_of(queue)->begin(); });
}

int kvswap_queue_copy(uint64_t queue, const kvswap_rows* targets, const kvswap_rows* sources, int64_t entries,
                      const kvswap_plan* plan, int path) {
  return guarded([&] {
    kvswap::check_cpu_path(path);
    auto runs = kvswap::plan_of(plan);
    auto rows = kvswap::checked_entries(targets, sources, entries, *runs);
    const auto copy = [runs = std::move(runs), rows = std::move(rows), path]() -> int64_t {
      kvswap::copy_entries(rows, *runs, path);
      return 0;
    };
    queue_of(queue)->run(copy, false);
  });
}

int kvswap_queue_call(uint64_t queue, int64_t (*fn)(void*), void* context, int always) {
  return guarded([&] {
    if (fn == nullptr) kvswap::refuse("there is no function to call");
    const auto call = [fn, context]() -> int64_t { return registry().calls_stopped ? 0 : fn(context); };
    queue_of(queue)->run(call, always != 0);
  });
}

int kvswap_queue_wait(uint64_t queue, const kvswap_event* event, int needs_data) {
  return guarded([&] { queue_of(queue)->wait(kvswap::checked(event).event, needs_data != 0); });
}

int kvswap_queue_record(uint64_t queue, kvswap_event** event) {
  return guarded([&] { *event = new kvswap_event{queue_of(queue)->record()}; });
}

void kvswap_queue_stop_calls(void) { registry().calls_stopped = true; }

int kvswap_event_wait(const kvswap_event* event, int64_t timeout_ns) { return event->event->wait(timeout_ns) ? 1 : 0; }
int64_t kvswap_event_failure(const kvswap_event* event) { return event->event->failure(); }
int64_t kvswap_event_time_ns(const kvswap_event* event) { return event->event->time_ns(); }
void kvswap_event_free(kvswap_event* event) { delete event; }
