// Copies of byte ranges inside device memory, against a fake driver. Shows nothing about a GPU.
#include <dlfcn.h>

#include <algorithm>
#include <numeric>

#include "../cuda/costs.h"
#include "expect.h"
#include "fake_libcuda.h"

using namespace kvswap::cuda;

namespace {

constexpr uint64_t kStream = 0x7700;
FakeCuda* fake = nullptr;

using Ranges = std::vector<kvswap_run>;

int copy(const Ranges& ranges, int path = KVSWAP_PATH_AUTO, uint64_t stream = kStream) {
  return kvswap_cuda_copy_ranges(ranges.data(), static_cast<int64_t>(ranges.size()), path, stream);
}

int64_t address(const std::vector<uint8_t>& memory, size_t at) {
  return static_cast<int64_t>(reinterpret_cast<uint64_t>(memory.data()) + at);
}

std::vector<uint8_t> random_bytes(Random& random, size_t nbytes) {
  std::vector<uint8_t> made(nbytes);
  for (auto& byte : made) byte = static_cast<uint8_t>(random());
  return made;
}

// Targets never meet; sources may.
Ranges random_ranges(Random& random, const std::vector<uint8_t>& source, const std::vector<uint8_t>& target) {
  Ranges ranges;
  for (size_t at = 0; at < target.size() - 600;) {
    const auto nbytes = static_cast<size_t>(pick(random, 1, 300));
    const auto of = static_cast<size_t>(pick(random, 0, static_cast<int64_t>(source.size() - nbytes)));
    ranges.push_back({address(source, of), address(target, at), static_cast<int64_t>(nbytes)});
    at += nbytes + static_cast<size_t>(pick(random, 0, 2) * 50);
  }
  std::shuffle(ranges.begin(), ranges.end(), random);
  return ranges;
}

void every_path_moves_every_byte_and_no_other(Random& random) {
  for (int path : {KVSWAP_PATH_AUTO, KVSWAP_PATH_RUNS, KVSWAP_PATH_BATCH}) {
    if (path == KVSWAP_PATH_BATCH && !fake->has_batch) continue;
    for (int i = 0; i < 40; ++i) {
      const auto source = random_bytes(random, 5000);
      auto target = random_bytes(random, 5000);
      const Ranges ranges = random_ranges(random, source, target);
      auto expected = target;
      for (const auto& range : ranges) {
        std::memcpy(expected.data() + (range.target - address(target, 0)),
                    source.data() + (range.source - address(source, 0)), static_cast<size_t>(range.blocks));
      }
      EXPECT(copy(ranges, path) == KVSWAP_OK);
      EXPECT(target == expected);
    }
  }
  EXPECT(fake->other_streams == 0);
}

Ranges equally_spaced(const std::vector<uint8_t>& source, const std::vector<uint8_t>& target, int64_t count) {
  Ranges ranges;
  for (int64_t i = 0; i < count; ++i) {
    ranges.push_back({address(source, 0) + 48 * i, address(target, 0) + 32 * i, 16});
  }
  return ranges;
}

// Equal distances are one call, and nothing is what the empty list asks for.
void ranges_at_equal_distances_are_one_call(Random& random) {
  const auto source = random_bytes(random, 4800);
  auto target = random_bytes(random, 4800);
  const int calls = fake->calls;
  EXPECT(copy({}) == KVSWAP_OK && fake->calls == calls);
  EXPECT(copy(equally_spaced(source, target, 100)) == KVSWAP_OK && fake->calls == calls + 1);
  for (size_t i = 0; i < 100; ++i) EXPECT(std::memcmp(&target[32 * i], &source[48 * i], 16) == 0);
}

// Equal distances, but more than a 2D copy takes. The pages between them are never touched.
void ranges_further_apart_than_a_2d_copy_may_go_one_by_one(Random& random) {
  constexpr int64_t kFar = kMaxPitch + int64_t{1}, kBytes = 2 * kFar + 4096;
  const auto source = random_bytes(random, 96);
  void* far = nullptr;
  EXPECT(kvswap_host_alloc(kBytes, -1, &far) == KVSWAP_OK);
  const auto to = static_cast<int64_t>(reinterpret_cast<uint64_t>(far));
  Ranges ranges;
  for (int64_t i = 0; i < 3; ++i) ranges.push_back({address(source, 0) + 32 * i, to + kFar * i, 24});
  EXPECT(copy(ranges, KVSWAP_PATH_RUNS) == KVSWAP_OK);
  for (int64_t i = 0; i < 3; ++i) {
    EXPECT(std::memcmp(static_cast<uint8_t*>(far) + kFar * i, &source[static_cast<size_t>(32 * i)], 24) == 0);
  }
  EXPECT(kvswap_host_free(far, kBytes) == KVSWAP_OK);
}

// Whatever the cost model says: a batch where AUTO may, else runs, and runs where the GPU has no batches after all.
void scattered_ranges_go_by_batches_where_these_are_allowed(Random& random) {
  const auto source = random_bytes(random, 200000);
  auto target = random_bytes(random, 200000);
  const Ranges ranges = random_ranges(random, source, target);
  fake->batches = 0;
  EXPECT(copy(ranges) == KVSWAP_OK && (fake->batches > 0) == (fake->has_batch != 0));
  if (!fake->has_batch) {
    EXPECT_REFUSED(copy(ranges, KVSWAP_PATH_BATCH), KVSWAP_UNAVAILABLE, "12.8");
    return;
  }
  fake->batches = 0;
  allow_paths(1 << KVSWAP_PATH_RUNS);
  EXPECT(copy(ranges) == KVSWAP_OK && fake->batches == 0);
  allow_paths(1 << KVSWAP_PATH_RUNS | 1 << KVSWAP_PATH_BATCH);
  fake->batch_result = kNotSupported;
  std::fill(target.begin(), target.end(), uint8_t{0});
  EXPECT(copy(ranges) == KVSWAP_OK && fake->batches == 0 && allowed_paths() == 1 << KVSWAP_PATH_RUNS);
  for (const auto& range : ranges) {
    EXPECT(std::memcmp(reinterpret_cast<void*>(range.target), reinterpret_cast<void*>(range.source),
                       static_cast<size_t>(range.blocks)) == 0);
  }
  EXPECT_REFUSED(copy(ranges, KVSWAP_PATH_BATCH), KVSWAP_UNAVAILABLE, "cuMemcpyBatchAsync");
  fake->batch_result = kSuccess;
  fake->largest_batch = 0;
  EXPECT(copy(equally_spaced(source, target, 4097), KVSWAP_PATH_BATCH) == KVSWAP_OK && fake->largest_batch == 4096);
}

void wrong_ranges_submit_nothing(Random& random) {
  const auto source = random_bytes(random, 100);
  auto target = random_bytes(random, 100);
  const int64_t of = address(source, 0), to = address(target, 0);
  const int calls = fake->calls;
  EXPECT_REFUSED(copy({{of, to, 10}}, KVSWAP_PATH_AUTO, 0), KVSWAP_INVALID, "legacy NULL stream");
  EXPECT_REFUSED(copy({{of, to, 10}}, KVSWAP_PATH_AUTO, 1), KVSWAP_INVALID, "legacy NULL stream");
  EXPECT_REFUSED(copy({{of, to, 10}}, KVSWAP_PATH_KERNEL), KVSWAP_INVALID, "does not copy ranges");
  for (const auto& wrong : Ranges{{0, to, 1}, {of, 0, 1}, {of, to, 0}, {of, to, -1}, {-5, to, 1}, {INT64_MAX, to, 2}}) {
    EXPECT_REFUSED(copy({wrong}), KVSWAP_INVALID, "no copy of device memory");
  }
  EXPECT_REFUSED(copy({{of, to, 10}, {of, to + 9, 10}}), KVSWAP_INVALID, "write the same memory");
  EXPECT_REFUSED(copy({{of, to, 10}, {to + 9, to + 20, 5}}), KVSWAP_INVALID, "reads what another one writes");
  EXPECT_REFUSED(copy({{of, to + 10, 10}, {to + 5, to + 30, 6}}), KVSWAP_INVALID, "reads what another one writes");
  EXPECT_REFUSED(copy({{to, to, 10}}), KVSWAP_INVALID, "reads what another one writes");
  EXPECT(copy({{of, to, 10}, {to + 10, to + 20, 5}, {of, to + 15, 5}}) == KVSWAP_OK && fake->calls == calls + 3);
  EXPECT_REFUSED(kvswap_cuda_copy_ranges(nullptr, 1, 0, kStream), KVSWAP_INVALID, "its ranges");
  fake->has_context = 0;
  EXPECT_REFUSED(copy({{of, to, 10}}), KVSWAP_UNAVAILABLE, "context");
  fake->has_context = 1;
  fake->fail_copy_number = fake->copies + 1;
  EXPECT_REFUSED(copy({{of, to, 10}}), KVSWAP_DRIVER, "CUDA error 700");
  fake->fail_copy_number = 0;
}

// This fake has none of the functions that share memory; tests/gpu/ipc_checks.py has one that does.
void a_driver_that_shares_no_memory_says_so() {
  kvswap_ipc_memory memory;
  uint64_t base = 0;
  int found = 0;
  uint8_t uuid[16] = {};
  EXPECT_REFUSED(kvswap_cuda_ipc_export(4096, &memory), KVSWAP_UNAVAILABLE, "cannot share memory");
  EXPECT_REFUSED(kvswap_cuda_ipc_open(memory.handle, &base), KVSWAP_UNAVAILABLE, "cannot share memory");
  EXPECT_REFUSED(kvswap_cuda_ipc_close(4096), KVSWAP_UNAVAILABLE, "cannot share memory");
  EXPECT_REFUSED(kvswap_cuda_device_of(4096, &found, uuid), KVSWAP_UNAVAILABLE, "cannot name its GPUs");
  EXPECT_REFUSED(kvswap_cuda_reaches(0, uuid, &found), KVSWAP_UNAVAILABLE, "cannot share memory");
}

}  // namespace

int main(int argc, char** argv) {
  EXPECT(argc == 2);
  void* library = dlopen("libcuda.so.1", RTLD_NOW);
  EXPECT(library != nullptr);
  const auto get = reinterpret_cast<FakeCuda* (*)()>(dlsym(library, "fake_cuda"));
  EXPECT(get != nullptr);  // else a real driver came first
  fake = get();
  fake->has_batch = std::string(argv[1]) == "new";
  Random random(11);
  every_path_moves_every_byte_and_no_other(random);
  ranges_at_equal_distances_are_one_call(random);
  ranges_further_apart_than_a_2d_copy_may_go_one_by_one(random);
  wrong_ranges_submit_nothing(random);
  a_driver_that_shares_no_memory_says_so();
  scattered_ranges_go_by_batches_where_these_are_allowed(random);
  std::printf("ranges, %s driver: all passed\n", argv[1]);
}
