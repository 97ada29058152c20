// Which path a copy takes, of how many driver calls it is, and the staged path: over the fake driver, kernels counted
// or run on the CPU. Prints one line per shape of real models.
#include <dlfcn.h>

#include <cmath>

#include "../cuda/costs.h"
#include "../cuda/rectangles.h"
#include "case.h"
#include "cpu_launch.h"
#include "fake_libcuda.h"

using namespace kvswap::cuda;

namespace {

FakeCuda* fake = nullptr;
Random shuffler(3);

int count_launch(const KernelArguments*, int, int, void*) { return ++launches, kSuccess; }

struct Model {
  const char* name;
  int64_t layers;
  std::vector<int64_t> rows;
};

// Memory that is not there: nothing is copied.
kvswap::Entries entries_of(const Model& model, int64_t layers, bool to_device) {
  int64_t block = 0;
  for (int64_t width : model.rows) block += width * model.layers;
  kvswap::Entries entries;
  uint64_t device = uint64_t{1} << 40, host = uint64_t{1} << 45;
  for (int64_t layer = 0; layer < layers; ++layer) {
    for (int64_t width : model.rows) {
      const kvswap_rows on_device{device, 20000, width, width}, on_host{host, 60000, width, block};
      entries.push_back(to_device ? kvswap::Entry{on_device, on_host} : kvswap::Entry{on_host, on_device});
      device += static_cast<uint64_t>(20000 * width);
      host += static_cast<uint64_t>(width);
    }
  }
  return entries;
}

// `blocks` blocks in `runs` runs, the distances between them uneven on both sides.
kvswap::Plan plan_of(int64_t blocks, int64_t runs) {
  std::vector<int64_t> targets(static_cast<size_t>(runs));
  std::iota(targets.begin(), targets.end(), 0);
  if (runs == blocks) std::shuffle(targets.begin(), targets.end(), shuffler);
  const int64_t length = blocks / runs;
  std::vector<kvswap_run> list;
  int64_t source = 0;
  for (int64_t i = 0; i < runs; ++i) {
    const int64_t rank = targets[static_cast<size_t>(i)];
    list.push_back({source, rank * (length + 1) + rank * rank % 3, length});
    source += length + 1 + i * i % 5;
  }
  return kvswap::checked_plan(list);
}

struct Seen {
  int calls, descriptors, copies_2d, batches, launched, path;
};

Seen submit(const kvswap::Entries& entries, const kvswap::Plan& plan, bool to_device, bool has_kernel) {
  fake->copies = fake->copies_2d = fake->batches = launches = 0;
  fake->calls = 0;
  const Copy copy = copy_of(has_kernel ? count_launch : nullptr, entries, plan, to_device);
  const int path = choose_path(copy);
  const kvswap_estimate expected = estimate(copy, path);
  enqueue(copy, KVSWAP_PATH_AUTO);
  const Seen seen{fake->calls + launches, fake->descriptors, fake->copies_2d, fake->batches, launches, path};
  EXPECT(path == KVSWAP_PATH_STAGED ? seen.calls <= expected.calls : seen.calls == expected.calls);
  fake->descriptors = 0;
  return seen;
}

const char* name_of(int path) {
  const char* names[] = {"", "", "", "runs", "batch", "kernel", "staged"};
  return names[path];
}

// The table of docs/native-ops.md: driver calls for a swap-in of all layers, and for an eviction.
void shapes_of_real_models_take_few_calls(bool has_kernel) {
  const Model models[] = {{"8 KB", 48, {8 << 10, 8 << 10}},       {"16 KB", 48, {16 << 10, 16 << 10}},
                          {"28 KB", 48, {28 << 10, 28 << 10}},    {"32 KB", 48, {32 << 10, 32 << 10}},
                          {"64 KB", 48, {64 << 10, 64 << 10}},    {"72 KB", 61, {72 << 10}},
                          {"128 KB", 36, {128 << 10, 128 << 10}}, {"41 + 8.25 KB", 61, {41984, 8448}}};
  const std::pair<int64_t, int64_t> shapes[] = {{1, 1},     {102, 3},  {100, 33},    {100, 100},
                                                {500, 500}, {2000, 4}, {2000, 2000}, {4000, 4000}};
  fake->count_only = 1;
  for (const auto& model : models) {
    for (const auto& [blocks, runs] : shapes) {
      const kvswap::Plan plan = plan_of(blocks, runs);
      const Seen in = submit(entries_of(model, 1, true), plan, true, has_kernel);
      const Seen out = submit(entries_of(model, model.layers, false), plan, false, has_kernel);
      std::printf("%s | %lld in %lld | %s %d %d | %s %d %d\n", model.name, static_cast<long long>(blocks),
                  static_cast<long long>(runs), name_of(in.path), in.calls, in.descriptors, name_of(out.path),
                  out.calls, out.descriptors);
      if (has_kernel || fake->has_batch != 0) EXPECT(in.calls <= kMostCalls && out.calls <= kMostCalls);
      if (has_kernel) {
        EXPECT(in.calls <= 128);
        if (model.rows[0] < (64 << 10)) EXPECT(in.batches == 0 && out.batches == 0);
        if (blocks == 102 && model.rows[0] >= (16 << 10))
          EXPECT(in.path == KVSWAP_PATH_RUNS && in.calls == 3 * static_cast<int>(model.rows.size()));
      }
    }
  }
  fake->count_only = 0;
}

// What was measured decides, and nothing else.
void the_cheapest_path_is_taken() {
  const Model model{"16 KB", 4, {16 << 10, 16 << 10}};
  const kvswap::Plan plan = plan_of(200, 200);
  const Copy copy = copy_of(count_launch, entries_of(model, 1, true), plan, true);
  const kvswap_costs before = costs_of(true);
  EXPECT(choose_path(copy) == KVSWAP_PATH_KERNEL);
  kvswap_costs costs = before;
  costs.kernel_rate = 3;
  costs.batch_copy_ns = 10;
  costs.descriptor_ns = 10;
  EXPECT(kvswap_cuda_set_costs(1, &costs) == KVSWAP_OK && choose_path(copy) == KVSWAP_PATH_BATCH);
  costs.call_ns = costs.copy_ns = costs.row_ns = 1;
  EXPECT(kvswap_cuda_set_costs(1, &costs) == KVSWAP_OK && choose_path(copy) == KVSWAP_PATH_RUNS);
  kvswap_costs read{};
  EXPECT(kvswap_cuda_costs(1, &read) == KVSWAP_OK && read.kernel_rate == 3 && read.call_ns == 1);
  costs.row_ns = 0;
  EXPECT_REFUSED(kvswap_cuda_set_costs(1, &costs), KVSWAP_INVALID, "must be positive");
  costs.row_ns = NAN;
  EXPECT_REFUSED(kvswap_cuda_set_costs(1, &costs), KVSWAP_INVALID, "must be positive");
  EXPECT(costs_of(true).row_ns == 1);
  EXPECT(kvswap_cuda_set_costs(1, &before) == KVSWAP_OK);
  for (int path : {KVSWAP_PATH_RUNS, KVSWAP_PATH_BATCH, KVSWAP_PATH_KERNEL}) {
    EXPECT(kvswap_cuda_allow(1 << path) == KVSWAP_OK && kvswap_cuda_allowed() == 1 << path);
    EXPECT(choose_path(copy) == path);
  }
  EXPECT(kvswap_cuda_allow(0) == KVSWAP_OK && choose_path(copy) == KVSWAP_PATH_RUNS);  // the last resort
  EXPECT_REFUSED(kvswap_cuda_allow(1), KVSWAP_INVALID, "no set of CUDA's paths");
  allow_paths(kAll);
}

void runs_at_equal_distances_are_one_copy() {
  const auto rectangles = [](std::vector<kvswap_run> runs, int64_t source_pitch, int64_t target_pitch) {
    const kvswap::Entry entry{{uint64_t{1} << 40, 1 << 20, 64, target_pitch}, {4096, 1 << 20, 64, source_pitch}};
    int number = 0;
    for_each_rectangle(entry, kvswap::checked_plan(std::move(runs)), [&](const Rectangle&) { ++number; });
    return number;
  };
  EXPECT(rectangles({{0, 10, 1}, {2, 13, 1}, {4, 16, 1}, {6, 19, 1}}, 64, 256) == 1);
  EXPECT(rectangles({{0, 10, 1}, {2, 13, 1}, {4, 17, 1}, {6, 21, 1}}, 64, 256) == 2);
  EXPECT(rectangles({{0, 10, 1}, {2, 8, 1}}, 64, 256) == 2);                          // never backwards
  EXPECT(rectangles({{0, 0, 3}, {4, 5, 3}, {8, 10, 3}}, 64, 64) == 1);                // dense on both sides
  EXPECT(rectangles({{0, 0, 3}, {4, 5, 3}, {8, 10, 3}, {12, 15, 3}}, 64, 256) == 3);  // across the runs
  EXPECT(rectangles({{0, 0, 3}, {4, 5, 3}}, 64, 256) == 2);                           // along them
  EXPECT(rectangles({{0, 0, 1}, {2, 2, 1}}, 64, kMaxPitch) == 2);                     // too far apart
  EXPECT(rectangles({{0, 0, 3}}, 64, kMaxPitch + int64_t{1}) == 3);
}

// The staging memory holds few blocks, so that it is filled many times; the host's rows have a trailer or none.
void the_staged_path_moves_every_byte(Random& random) {
  alignas(16) static uint8_t memory[40000];
  int copied = 0;
  for (int i = 0; i < 120; ++i) {
    Case made = make_case(random, true, i % 2 == 0, 300);
    kvswap_plan* plan = make_plan(made);
    const auto& runs = *plan->plan;
    const auto rows = kvswap::checked_entries(made.target.rows.data(), made.source.rows.data(), made.entries(), runs);
    const int64_t block = block_bytes(rows), pieces = 1 + i % 5;
    EXPECT(kvswap_cuda_set_staging(reinterpret_cast<uint64_t>(memory), block * pieces) == KVSWAP_OK);
    const Copy copy = copy_of(launch_on_cpu, rows, runs, false);
    EXPECT(fits_staging(copy) && blocks_in_staging(block) == pieces);
    if (!runs.runs.empty()) {
      ++copied;
      std::memset(memory, 0xEE, sizeof(memory));
      const int waits = fake->event_waits, records = fake->event_records;
      enqueue(copy, KVSWAP_PATH_STAGED);
      EXPECT(fake->event_waits == waits + 1 && fake->event_records == records + 1);
      made.check();
      const auto is_untouched = [](uint8_t byte) { return byte == 0xEE; };
      EXPECT(std::all_of(memory + block * pieces, memory + sizeof(memory), is_untouched));
    }
    kvswap_plan_free(plan);
  }
  EXPECT(copied > 60);
  EXPECT(kvswap_cuda_set_staging(0, 0) == KVSWAP_OK);
}

void staging_is_for_whole_blocks_on_their_way_out() {
  const Model model{"16 KB", 4, {16 << 10, 16 << 10}};
  const kvswap::Plan plan = plan_of(8, 8);
  const auto fits = [&](const kvswap::Entries& entries, bool to_device) {
    return fits_staging(copy_of(count_launch, entries, plan, to_device));
  };
  EXPECT(!fits(entries_of(model, 4, false), false));  // there is none
  EXPECT(kvswap_cuda_set_staging(1 << 20, 1 << 20) == KVSWAP_OK);
  EXPECT(fits(entries_of(model, 4, false), false));
  EXPECT(!fits(entries_of(model, 4, true), true));
  auto apart = entries_of(model, 4, false);
  std::swap(apart[0], apart[1]);
  EXPECT(!fits(apart, false));
  EXPECT(kvswap_cuda_set_staging(1 << 20, 100 << 10) == KVSWAP_OK);
  EXPECT(!fits(entries_of(model, 4, false), false));  // smaller than a block
  EXPECT_REFUSED(kvswap_cuda_set_staging(0, 5), KVSWAP_INVALID, "no staging memory");
  EXPECT(kvswap_cuda_set_staging(0, 0) == KVSWAP_OK);
}

}  // namespace

int main(int argc, char** argv) {
  EXPECT(argc == 2);
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  EXPECT(library != nullptr);
  const auto get = reinterpret_cast<FakeCuda* (*)()>(dlsym(library, "fake_cuda"));
  EXPECT(get != nullptr);  // else a real driver came first
  fake = get();
  const std::string kind = argv[1];
  fake->has_batch = kind != "old";
  if (kind == "table") {
    EXPECT(kvswap_cuda_set_staging(uint64_t{1} << 50, 32 << 20) == KVSWAP_OK);
    shapes_of_real_models_take_few_calls(true);
    EXPECT(kvswap_cuda_set_staging(0, 0) == KVSWAP_OK);
    return 0;
  }
  shapes_of_real_models_take_few_calls(true);
  shapes_of_real_models_take_few_calls(false);
  if (fake->has_batch != 0) the_cheapest_path_is_taken();
  runs_at_equal_distances_are_one_copy();
  Random random(5);
  the_staged_path_moves_every_byte(random);
  staging_is_for_whole_blocks_on_their_way_out();
  std::puts("all passed");
}
