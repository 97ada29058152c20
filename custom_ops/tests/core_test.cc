// CPU copies and queues, made to run under sanitizers: random copies against a plain loop, refusals, order.
#include <atomic>
#include <chrono>
#include <thread>

#include "case.h"

namespace {

void copies_move_every_byte_and_no_other(Random& random) {
  for (int path : {KVSWAP_PATH_AUTO, KVSWAP_PATH_MEMCPY, KVSWAP_PATH_STREAM}) {
    for (int i = 0; i < 120; ++i) {
      Case made = make_case(random, i % 2 == 0, i % 3 == 0, i % 10 == 0 ? 9000 : 700);
      kvswap_plan* plan = make_plan(made);
      EXPECT(kvswap_copy(made.target.rows.data(), made.source.rows.data(), made.entries(), plan, path) == KVSWAP_OK);
      made.check();
      kvswap_plan_free(plan);
    }
  }
}

void large_copies_stream(Random& random) {
  for (bool to_host : {false, true}) {
    Case made = make_case(random, to_host, false, 100000);
    kvswap_plan* plan = make_plan(made);
    EXPECT(kvswap_copy(made.target.rows.data(), made.source.rows.data(), made.entries(), plan, KVSWAP_PATH_AUTO) == 0);
    made.check();
    kvswap_plan_free(plan);
  }
}

void wrong_arguments_move_nothing() {
  std::vector<uint8_t> to(4 * 8, 1), of(4 * 8, 2);
  kvswap_rows target{reinterpret_cast<uint64_t>(to.data()), 4, 8, 8}, source = target;
  source.address = reinterpret_cast<uint64_t>(of.data());
  const auto copy = [](kvswap_rows to_rows, kvswap_rows of_rows, kvswap_run run, int path = 0, int64_t entries = 1) {
    kvswap_plan* plan = nullptr;
    const int code = kvswap_plan_runs(&run, 1, &plan);
    if (code != KVSWAP_OK) return code;
    const int result = kvswap_copy(&to_rows, &of_rows, entries, plan, path);
    kvswap_plan_free(plan);
    return result;
  };
  EXPECT_REFUSED(copy(target, source, {3, 0, 2}), KVSWAP_INVALID, "reads row 4 of 4");
  EXPECT_REFUSED(copy(target, source, {0, 4, 1}), KVSWAP_INVALID, "writes row 4 of 4");
  EXPECT_REFUSED(copy(target, source, {-1, 0, 1}), KVSWAP_INVALID, "not possible");
  EXPECT_REFUSED(copy(target, source, {0, 0, 0}), KVSWAP_INVALID, "not possible");
  EXPECT_REFUSED(copy(target, source, {0, INT64_MAX, INT64_MAX}), KVSWAP_INVALID, "not possible");
  EXPECT_REFUSED(copy(target, source, {0, 0, 1}, KVSWAP_PATH_BATCH), KVSWAP_INVALID, "not one of the CPU's");
  EXPECT_REFUSED(copy(target, source, {0, 0, 1}, 0, 0), KVSWAP_INVALID, "rows on both sides");
  EXPECT_REFUSED(copy(target, target, {0, 1, 1}), KVSWAP_INVALID, "same memory");
  kvswap_rows wider = source, short_pitch = source, nothing = source, endless = source;
  wider.row_bytes = wider.pitch = 16;
  short_pitch.pitch = 4;
  nothing.address = 0;
  endless.num_rows = int64_t{1} << 60;
  EXPECT_REFUSED(copy(target, wider, {0, 0, 1}), KVSWAP_INVALID, "rows of 16 bytes");
  EXPECT_REFUSED(copy(target, short_pitch, {0, 0, 1}), KVSWAP_INVALID, "not memory");
  EXPECT_REFUSED(copy(target, nothing, {0, 0, 1}), KVSWAP_INVALID, "not memory");
  EXPECT_REFUSED(copy(target, endless, {0, 0, 1}), KVSWAP_INVALID, "address space");
  const int64_t sources[] = {0, 1}, twice[] = {2, 2};
  kvswap_plan* plan = nullptr;
  EXPECT_REFUSED(kvswap_plan_slots(sources, twice, 2, &plan), KVSWAP_INVALID, "written twice");
  const int64_t endless_slots[] = {INT64_MAX, INT64_MAX};
  EXPECT_REFUSED(kvswap_plan_slots(endless_slots, twice, 2, &plan), KVSWAP_INVALID, "not possible");
  EXPECT_REFUSED(kvswap_copy(&target, &source, 1, nullptr, 0), KVSWAP_INVALID, "needs a plan");
  EXPECT(kvswap_plan_slots(sources, sources, 2, &plan) == KVSWAP_OK);
  const kvswap_rows same[] = {target, target}, two[] = {source, source};
  EXPECT_REFUSED(kvswap_copy(same, two, 2, plan, 0), KVSWAP_INVALID, "two of the targets");
  // The second target's rows start between the first one's and reach into the next of them.
  const kvswap_rows apart[] = {{target.address, 2, 8, 16}, {target.address + 12, 2, 8, 16}};
  EXPECT_REFUSED(kvswap_copy(apart, two, 2, plan, 0), KVSWAP_INVALID, "two of the targets");
  kvswap_plan_free(plan);
  EXPECT(to == std::vector<uint8_t>(4 * 8, 1));
}

void slots_become_the_fewest_runs() {
  const int64_t sources[] = {6, 4, 5, 9, 9}, targets[] = {3, 1, 2, 5, 6};
  kvswap_plan* plan = nullptr;
  EXPECT(kvswap_plan_slots(sources, targets, 5, &plan) == KVSWAP_OK);
  EXPECT(kvswap_plan_size(plan) == 3);
  const kvswap_run& first = kvswap_plan_data(plan)[0];
  EXPECT(first.source == 4 && first.target == 1 && first.blocks == 3);
  kvswap_plan_free(plan);
}

int64_t sleep_a_moment(void*, int) {
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return 0;
}

int64_t fail(void*, int) { return 7; }

int64_t count_always(void* counter, int) {
  ++*static_cast<int64_t*>(counter);  // plain, so that the thread sanitizer sees a missing order
  return 0;
}

int64_t count(void* counter, int failed) { return failed ? 0 : count_always(counter, failed); }

int64_t close_own(void* queue, int) { return kvswap_queue_close(*static_cast<uint64_t*>(queue)); }

struct Pair {
  uint64_t first, second;
};

Pair make_queues() {
  Pair pair{};
  EXPECT(kvswap_queue_create("first", &pair.first) == KVSWAP_OK);
  EXPECT(kvswap_queue_create("second", &pair.second) == KVSWAP_OK);
  return pair;
}

void close(Pair pair) {
  EXPECT(kvswap_queue_close(pair.first) == KVSWAP_OK);
  EXPECT(kvswap_queue_close(pair.second) == KVSWAP_OK);
}

kvswap_event* record(uint64_t queue) {
  kvswap_event* event = nullptr;
  EXPECT(kvswap_queue_record(queue, &event) == KVSWAP_OK);
  return event;
}

// A block goes to and fro between two queues that wait for each other; both are slow at random.
void events_order_queues(Random& random) {
  const Pair queues = make_queues();
  std::vector<uint8_t> device(64 * 4096), host(64 * 4096);
  for (auto& byte : device) byte = static_cast<uint8_t>(random());
  const auto original = device;
  kvswap_rows device_rows{reinterpret_cast<uint64_t>(device.data()), 64, 4096, 4096}, host_rows = device_rows;
  host_rows.address = reinterpret_cast<uint64_t>(host.data());
  const kvswap_run all{0, 0, 64};
  kvswap_plan* plan = nullptr;
  EXPECT(kvswap_plan_runs(&all, 1, &plan) == KVSWAP_OK);
  int64_t counter = 0;
  std::vector<kvswap_event*> events;
  for (int round = 0; round < 60; ++round) {
    const bool out = round % 2 == 0;
    const uint64_t queue = out ? queues.first : queues.second;
    EXPECT(kvswap_queue_begin(queue) == KVSWAP_OK);
    if (!events.empty()) EXPECT(kvswap_queue_wait(queue, events.back(), 1) == KVSWAP_OK);
    if (pick(random, 0, 2) == 0) EXPECT(kvswap_queue_call(queue, sleep_a_moment, nullptr) == KVSWAP_OK);
    EXPECT(kvswap_queue_copy(queue, out ? &host_rows : &device_rows, out ? &device_rows : &host_rows, 1, plan, 0) == 0);
    EXPECT(kvswap_queue_call(queue, count, &counter) == KVSWAP_OK);
    events.push_back(record(queue));
  }
  kvswap_plan_free(plan);  // queued copies keep what they need
  EXPECT(kvswap_event_wait(events.back(), -1) == 1);
  EXPECT(kvswap_event_failure(events.back()) == 0);
  EXPECT(counter == 60 && device == original && host == original);
  for (size_t i = 1; i < events.size(); ++i) {
    EXPECT(kvswap_event_time_ns(events[i - 1]) <= kvswap_event_time_ns(events[i]));
  }
  for (auto* event : events) kvswap_event_free(event);
  close(queues);
}

void failures_skip_their_unit_only() {
  const Pair queues = make_queues();
  int64_t skipped = 0, ran = 0, cleaned = 0;
  EXPECT(kvswap_queue_begin(queues.first) == KVSWAP_OK);
  EXPECT(kvswap_queue_call(queues.first, fail, nullptr) == KVSWAP_OK);
  EXPECT(kvswap_queue_call(queues.first, count, &skipped) == KVSWAP_OK);
  EXPECT(kvswap_queue_call(queues.first, count_always, &cleaned) == KVSWAP_OK);
  kvswap_event* failed = record(queues.first);
  EXPECT(kvswap_queue_begin(queues.first) == KVSWAP_OK);
  EXPECT(kvswap_queue_call(queues.first, count, &ran) == KVSWAP_OK);
  kvswap_event* fine = record(queues.first);
  EXPECT(kvswap_queue_wait(queues.second, failed, 0) == KVSWAP_OK);
  kvswap_event* ordered = record(queues.second);
  EXPECT(kvswap_queue_wait(queues.second, failed, 1) == KVSWAP_OK);
  EXPECT(kvswap_queue_call(queues.second, count, &skipped) == KVSWAP_OK);
  kvswap_event* inherited = record(queues.second);
  EXPECT(kvswap_event_wait(inherited, 60'000'000'000) == 1);
  EXPECT(kvswap_event_wait(fine, -1) == 1);
  EXPECT(kvswap_event_failure(failed) == 7 && kvswap_event_failure(fine) == 0);
  EXPECT(kvswap_event_failure(ordered) == 0 && kvswap_event_failure(inherited) == -7);
  EXPECT(skipped == 0 && ran == 1 && cleaned == 1);
  for (auto* event : {failed, fine, ordered, inherited}) kvswap_event_free(event);
  close(queues);
  EXPECT_REFUSED(kvswap_queue_begin(queues.first), KVSWAP_INVALID, "no queue");
  EXPECT_REFUSED(kvswap_queue_close(queues.first), KVSWAP_INVALID, "no queue");
  EXPECT_REFUSED(kvswap_queue_begin(0), KVSWAP_INVALID, "no queue 0");
}

void waiting_can_end_early() {
  const Pair queues = make_queues();
  std::atomic<bool> open{false};
  const auto gate = [](void* flag, int) -> int64_t {
    while (!static_cast<std::atomic<bool>*>(flag)->load()) std::this_thread::yield();
    return 0;
  };
  EXPECT(kvswap_queue_call(queues.first, gate, &open) == KVSWAP_OK);
  kvswap_event* event = record(queues.first);
  EXPECT(kvswap_event_wait(event, 0) == 0);
  EXPECT(kvswap_event_wait(event, 1'000'000) == 0);
  std::thread opener([&open] { sleep_a_moment(nullptr, 0), open = true; });
  EXPECT(kvswap_event_wait(event, INT64_MAX) == 1);
  EXPECT(kvswap_event_wait(event, -1) == 1);
  opener.join();
  kvswap_event_free(event);
  close(queues);
}

void a_queue_is_not_closed_by_its_own_work() {
  const Pair queues = make_queues();
  uint64_t queue = queues.first;
  EXPECT(kvswap_queue_call(queue, close_own, &queue) == KVSWAP_OK);
  kvswap_event* event = record(queue);
  EXPECT(kvswap_event_wait(event, -1) == 1);
  EXPECT(kvswap_event_failure(event) == KVSWAP_INVALID);
  kvswap_event_free(event);
  close(queues);
}

// Last: nothing starts queues again.
void stopped_queues_leave_memory_alone() {
  const Pair queues = make_queues();
  constexpr int64_t kRows = 8192, kPitch = 1024, kBytes = kRows * kPitch;
  auto* to = new std::vector<uint8_t>(kBytes);
  const std::vector<uint8_t> of(kBytes, 1);
  const kvswap_rows target{reinterpret_cast<uint64_t>(to->data()), kRows, kPitch - 8, kPitch};
  const kvswap_rows source{reinterpret_cast<uint64_t>(of.data()), kRows, kPitch - 8, kPitch};
  const kvswap_run run{0, 0, kRows};
  const int path = KVSWAP_PATH_MEMCPY;  // many of them, which the address sanitizer sees one by one
  kvswap_plan* plan = nullptr;
  EXPECT(kvswap_plan_runs(&run, 1, &plan) == KVSWAP_OK);
  kvswap_event* started = nullptr;
  for (int i = 0; i < 300; ++i) {
    EXPECT(kvswap_queue_copy(queues.first, &target, &source, 1, plan, path) == KVSWAP_OK);
    if (i == 0) started = record(queues.first);
  }
  int64_t called = 0;
  EXPECT(kvswap_queue_call(queues.first, count_always, &called) == KVSWAP_OK);
  EXPECT(kvswap_event_wait(started, -1) == 1);
  kvswap_event_free(started);
  sleep_a_moment(nullptr, 0);  // else this thread runs when the other one pauses, between two copies
  kvswap_queue_stop();
  delete to;  // the sanitizers see who writes there now
  std::vector<uint8_t> other(kBytes);
  const kvswap_rows untouched{reinterpret_cast<uint64_t>(other.data()), kRows, kPitch - 8, kPitch};
  EXPECT(kvswap_queue_copy(queues.first, &untouched, &source, 1, plan, path) == KVSWAP_OK);
  kvswap_event* event = record(queues.first);
  EXPECT(kvswap_event_wait(event, -1) == 1);
  EXPECT(kvswap_event_failure(event) == KVSWAP_STOPPED && called == 0);
  EXPECT(other == std::vector<uint8_t>(kBytes));
  kvswap_event_free(event);
  kvswap_plan_free(plan);
  close(queues);
}

void host_memory_is_zeroed_and_bounded() {
  void* memory = nullptr;
  EXPECT(kvswap_host_alloc(100000, 0, &memory) == KVSWAP_OK);
  for (int64_t i = 0; i < 100000; ++i) EXPECT(static_cast<uint8_t*>(memory)[i] == 0);
  EXPECT(kvswap_host_free(memory, 100000) == KVSWAP_OK);
  EXPECT_REFUSED(kvswap_host_alloc(0, -1, &memory), KVSWAP_INVALID, "at least one byte");
  EXPECT_REFUSED(kvswap_host_alloc(4096, 5000, &memory), KVSWAP_INVALID, "NUMA node");
  EXPECT_REFUSED(kvswap_host_alloc(int64_t{1} << 60, -1, &memory), KVSWAP_OUT_OF_MEMORY, "refused");
  EXPECT_REFUSED(kvswap_host_free(nullptr, 4096), KVSWAP_INVALID, "not a host buffer");
}

}  // namespace

int main() {
  Random random(20240607);
  EXPECT(kvswap_abi() == KVSWAP_ABI);
  copies_move_every_byte_and_no_other(random);
  large_copies_stream(random);
  wrong_arguments_move_nothing();
  slots_become_the_fewest_runs();
  events_order_queues(random);
  failures_skip_their_unit_only();
  waiting_can_end_early();
  a_queue_is_not_closed_by_its_own_work();
  host_memory_is_zeroed_and_bounded();
  stopped_queues_leave_memory_alone();
  std::puts("core: all passed");
}
