// The host side of GPU copies against a fake driver, and the kernel's body on the CPU. Shows nothing about a GPU.
#include <dlfcn.h>

#include "../cuda/costs.h"
#include "case.h"
#include "cpu_launch.h"
#include "fake_libcuda.h"

using namespace kvswap::cuda;

namespace {

FakeCuda* fake = nullptr;
int copy(Case& made, bool to_device, int path, uint64_t stream = kStream) {
  kvswap_plan* plan = make_plan(made);
  const int code = kvswap_cuda_copy(made.target.rows.data(), made.source.rows.data(), made.entries(), plan,
                                    to_device ? 1 : 0, path, stream);
  kvswap_plan_free(plan);
  return code;
}

void every_path_moves_every_byte(Random& random) {
  for (int path : {KVSWAP_PATH_AUTO, KVSWAP_PATH_RUNS, KVSWAP_PATH_BATCH}) {
    for (int i = 0; i < 80; ++i) {
      Case made = make_case(random, i % 2 == 0, i % 3 == 0, 700);
      EXPECT(copy(made, i % 2 != 0, path) == KVSWAP_OK);
      made.check();
    }
  }
  EXPECT(fake->copies > 0 && fake->copies_2d > 0 && fake->batches > 0);
  EXPECT(fake->other_streams == 0 && fake->last_stream == kStream);
}

void the_kernel_moves_every_byte(Random& random) {
  int copied = 0, narrow = 0;
  for (int i = 0; i < 60; ++i) {
    Case made = make_case(random, i % 2 == 0, i % 3 != 0, i % 8 == 0 ? 40000 : 700);
    kvswap_plan* plan = make_plan(made);
    const auto& runs = *plan->plan;
    const auto rows = kvswap::checked_entries(made.target.rows.data(), made.source.rows.data(), made.entries(), runs);
    for (const auto& row : rows) narrow += access_bytes(row) < kVectorBytes ? 1 : 0;
    if (!runs.runs.empty()) {
      ++copied;
      EXPECT(copy_by_kernel(copy_of(launch_on_cpu, rows, runs, i % 2 != 0)));
      made.check();
    }
    kvswap_plan_free(plan);
  }
  EXPECT(launches > 20 && copied > 20 && narrow > 20);
}

// More runs than blocks in a run, on one side with something between the rows: one rectangle for each of the blocks.
void runs_at_equal_distances_move_every_byte() {
  constexpr int64_t kSlots = 64, kWidth = 24, kPitch = 40;
  static uint8_t host[kSlots * kPitch], device[kSlots * kWidth];
  for (size_t i = 0; i < sizeof(host); ++i) host[i] = static_cast<uint8_t>(i % 251 + 1);
  std::vector<kvswap_run> list;
  for (int64_t i = 0; i < 8; ++i) list.push_back({5 * i, 7 * i, 2});
  kvswap_plan* plan = nullptr;
  EXPECT(kvswap_plan_runs(list.data(), static_cast<int64_t>(list.size()), &plan) == KVSWAP_OK);
  const kvswap_rows to{reinterpret_cast<uint64_t>(device), kSlots, kWidth, kWidth};
  const kvswap_rows of{reinterpret_cast<uint64_t>(host), kSlots, kWidth, kPitch};
  const int calls = fake->calls;
  EXPECT(kvswap_cuda_copy(&to, &of, 1, plan, 1, KVSWAP_PATH_RUNS, kStream) == KVSWAP_OK && fake->calls == calls + 2);
  for (const auto& run : list) {
    for (int64_t i = 0; i < run.blocks; ++i) {
      const uint8_t* row = device + (run.target + i) * kWidth;
      EXPECT(std::memcmp(row, host + (run.source + i) * kPitch, kWidth) == 0);
    }
  }
  kvswap_plan_free(plan);
}

// Every width of access, and rows that end inside a piece, at its end, and just behind it.
void rows_of_every_alignment_are_copied() {
  constexpr int64_t kPiece = kLanes * kLoads;
  alignas(16) static uint8_t target[3 * 40000 + 16], source[3 * 40000 + 16];
  for (size_t i = 0; i < sizeof(source); ++i) source[i] = static_cast<uint8_t>(i % 251);
  const std::vector<kvswap_run> list{{0, 2, 1}, {1, 0, 2}};
  const kvswap::Plan plan = kvswap::checked_plan(list);
  for (int64_t pitch : {33, 34, 36, 40, 48}) {
    const kvswap_rows even{4096, 3, 32, 32}, odd{8192, 3, 32, pitch};
    EXPECT(access_bytes({even, odd}) == pitch - 32 && access_bytes({odd, even}) == pitch - 32);
  }
  for (int unit = 1; unit <= kVectorBytes; unit *= 2) {
    for (int64_t units : {int64_t{1}, kPiece - 1, kPiece, kPiece + 1, 2 * kPiece + 33}) {
      const int64_t width = unit * units, shift = unit % kVectorBytes;
      const kvswap_rows to{reinterpret_cast<uint64_t>(target) + shift, 3, width, width};
      const kvswap_rows of{reinterpret_cast<uint64_t>(source) + shift, 3, width, width};
      std::memset(target, 0xEE, sizeof(target));
      const auto rows = kvswap::checked_entries(&to, &of, 1, plan);
      EXPECT(access_bytes(rows[0]) == unit);
      EXPECT(copy_by_kernel(copy_of(launch_on_cpu, rows, plan, true)));
      for (const auto& run : list) {
        const auto nbytes = static_cast<size_t>(run.blocks * width);
        EXPECT(std::memcmp(target + shift + run.target * width, source + shift + run.source * width, nbytes) == 0);
      }
      for (int64_t i = shift + 3 * width; i < static_cast<int64_t>(sizeof(target)); ++i) EXPECT(target[i] == 0xEE);
    }
  }
}

// More runs than one launch has room for, and more copies than one batch may have.
void long_lists_are_cut() {
  constexpr int64_t kSlots = 10000, kWidth = 16;
  alignas(16) static uint8_t target[kSlots * kWidth], source[kSlots * kWidth];
  std::vector<int64_t> sources, targets;
  for (int64_t i = 0; i < kSlots; ++i) {
    source[i * kWidth] = static_cast<uint8_t>(i % 251);
    sources.push_back(i);
    targets.push_back(kSlots - 1 - i);
  }
  kvswap_plan* plan = nullptr;
  EXPECT(kvswap_plan_slots(sources.data(), targets.data(), kSlots, &plan) == KVSWAP_OK);
  const kvswap_rows to{reinterpret_cast<uint64_t>(target), kSlots, kWidth, kWidth};
  const kvswap_rows of{reinterpret_cast<uint64_t>(source), kSlots, kWidth, kWidth};
  const auto rows = kvswap::checked_entries(&to, &of, 1, *plan->plan);
  launches = 0;
  EXPECT(copy_by_kernel(copy_of(launch_on_cpu, rows, *plan->plan, true)));
  EXPECT(launches == (kSlots + kKernelRuns - 1) / kKernelRuns);
  for (int64_t i = 0; i < kSlots; ++i) EXPECT(target[(kSlots - 1 - i) * kWidth] == i % 251);
  fake->batches = 0;
  EXPECT(kvswap_cuda_copy(&to, &of, 1, plan, 1, KVSWAP_PATH_BATCH, kStream) == KVSWAP_OK);
  EXPECT(fake->batches == 3 && fake->largest_batch == 4096);
  kvswap_plan_free(plan);
}

int launch_without_code(const KernelArguments*, int, int, void*) { return ++launches, 209; }
int launch_that_fails(const KernelArguments*, int, int, void*) { return 700; }

KernelEntry seen;
int launch_that_looks(const KernelArguments* arguments, int, int, void*) {
  seen = arguments->entry[0];
  return kSuccess;
}

// The kernel is an offer: where this GPU or this memory is not for it, AUTO copies all the same.
void without_a_usable_kernel_auto_falls_back() {
  constexpr int64_t kSlots = 64, kWidth = 32;
  alignas(16) static uint8_t target[kSlots * kWidth], source[kSlots * kWidth];
  for (size_t i = 0; i < sizeof(source); ++i) source[i] = static_cast<uint8_t>(i % 251);
  const kvswap_rows to{reinterpret_cast<uint64_t>(target), kSlots, kWidth, kWidth};
  const kvswap_rows of{reinterpret_cast<uint64_t>(source), kSlots, kWidth, kWidth};
  std::vector<kvswap_run> list;
  for (int64_t i = 0; i < kSlots; ++i) list.push_back({i, kSlots - 1 - i, 1});
  const kvswap::Plan plan = kvswap::checked_plan(list);
  const auto rows = kvswap::checked_entries(&to, &of, 1, plan);
  const auto enqueue_on = [&](KernelLaunch launch, int path, bool to_device) {
    std::memset(target, 0, sizeof(target));
    allow_paths(1 << KVSWAP_PATH_KERNEL | 1 << KVSWAP_PATH_RUNS);
    return kvswap::guarded([&] { enqueue(copy_of(launch, rows, plan, to_device), path); });
  };
  const auto is_copied = [&] {
    for (int64_t i = 0; i < kSlots; ++i) {
      if (std::memcmp(target + (kSlots - 1 - i) * kWidth, source + i * kWidth, kWidth) != 0) return false;
    }
    return true;
  };
  launches = 0;
  EXPECT(enqueue_on(launch_without_code, KVSWAP_PATH_AUTO, true) == KVSWAP_OK && is_copied());
  EXPECT(launches == 1 && allowed_paths() == 1 << KVSWAP_PATH_RUNS);  // it is not tried again
  EXPECT_REFUSED(enqueue_on(launch_without_code, KVSWAP_PATH_KERNEL, true), KVSWAP_UNAVAILABLE, "copy kernel");
  EXPECT_REFUSED(enqueue_on(launch_that_fails, KVSWAP_PATH_AUTO, true), KVSWAP_DRIVER, "restart the worker");
  fake->is_pageable = 1;
  EXPECT(enqueue_on(launch_that_fails, KVSWAP_PATH_AUTO, true) == KVSWAP_OK && is_copied());
  EXPECT_REFUSED(enqueue_on(launch_that_fails, KVSWAP_PATH_KERNEL, false), KVSWAP_UNAVAILABLE, "host memory");
  fake->is_pageable = 0;
  fake->kernel_offset = uint64_t{1} << 60;
  EXPECT(enqueue_on(launch_that_looks, KVSWAP_PATH_KERNEL, true) == KVSWAP_OK);
  EXPECT(seen.source == of.address + fake->kernel_offset && seen.target == to.address);
  EXPECT(enqueue_on(launch_that_looks, KVSWAP_PATH_KERNEL, false) == KVSWAP_OK);
  EXPECT(seen.source == of.address && seen.target == to.address + fake->kernel_offset);
  fake->kernel_offset = 0;
  allow_paths(kAll);
}

// Registered memory may have an address of its own on the GPU: every path uses it, and the bytes are the same.
void memory_is_addressed_as_the_gpu_knows_it(Random& random) {
  fake->kernel_offset = uint64_t{1} << 60;
  fake->unified_2d = 0;
  const int copies_2d = fake->copies_2d;
  for (int path : {KVSWAP_PATH_RUNS, KVSWAP_PATH_BATCH}) {
    for (int i = 0; i < 40; ++i) {
      Case made = make_case(random, i % 2 == 0, false, 200);
      EXPECT(copy(made, i % 2 != 0, path) == KVSWAP_OK);
      made.check();
    }
  }
  EXPECT(fake->unified_2d > 0 && fake->unified_2d == fake->copies_2d - copies_2d);
  fake->kernel_offset = 0;
}

// The pages between the rows are never touched.
void rows_further_apart_than_a_2d_copy_may_go_one_by_one() {
  constexpr int64_t kFar = kMaxPitch + int64_t{1}, kBytes = 2 * kFar + 4096;
  void* pool = nullptr;
  EXPECT(kvswap_host_alloc(kBytes, -1, &pool) == KVSWAP_OK);
  static uint8_t device[3 * 24];
  for (size_t i = 0; i < sizeof(device); ++i) device[i] = static_cast<uint8_t>(i + 1);
  const kvswap_rows far{reinterpret_cast<uint64_t>(pool), 3, 24, kFar};
  const kvswap_rows near{reinterpret_cast<uint64_t>(device), 3, 24, 24};
  const kvswap_run run{0, 0, 3};
  kvswap_plan* plan = nullptr;
  EXPECT(kvswap_plan_runs(&run, 1, &plan) == KVSWAP_OK);
  EXPECT(kvswap_cuda_copy(&far, &near, 1, plan, 0, KVSWAP_PATH_RUNS, kStream) == KVSWAP_OK);
  for (int64_t i = 0; i < 3; ++i) EXPECT(std::memcmp(static_cast<uint8_t*>(pool) + i * kFar, device + i * 24, 24) == 0);
  kvswap_plan_free(plan);
  EXPECT(kvswap_host_free(pool, kBytes) == KVSWAP_OK);
}

void wrong_arguments_submit_nothing(Random& random) {
  Case made = make_case(random, false, true, 64);
  while (made.targets.size() < 2) made = make_case(random, false, true, 64);
  const auto before = made.target.memory;
  const int copies = fake->copies;
  EXPECT_REFUSED(copy(made, true, 0, 0), KVSWAP_INVALID, "legacy NULL stream");
  EXPECT_REFUSED(copy(made, true, 0, 1), KVSWAP_INVALID, "legacy NULL stream");
  EXPECT_REFUSED(copy(made, true, KVSWAP_PATH_MEMCPY), KVSWAP_INVALID, "not one of CUDA's");
  EXPECT_REFUSED(copy(made, true, KVSWAP_PATH_KERNEL), KVSWAP_UNAVAILABLE, "_core_cuda.so");
  fake->has_context = 0;
  EXPECT_REFUSED(copy(made, true, 0), KVSWAP_UNAVAILABLE, "context");
  fake->has_context = 1;
  EXPECT(made.target.memory == before && fake->copies == copies);
}

void driver_errors_are_named(Random& random) {
  Case made = make_case(random, false, true, 64);
  while (made.targets.empty()) made = make_case(random, false, true, 64);
  fake->fail_copy_number = fake->copies + 1;
  EXPECT_REFUSED(copy(made, true, KVSWAP_PATH_RUNS), KVSWAP_DRIVER, "CUDA error 700 (CUDA_ERROR_ILLEGAL_ADDRESS); ");
  EXPECT(std::string(kvswap_last_error()).find("context of this process is lost: restart") != std::string::npos);
  fake->fail_copy_number = fake->copies + 1;
  EXPECT_REFUSED(copy(made, true, KVSWAP_PATH_BATCH), KVSWAP_DRIVER, "cuMemcpyBatchAsync: CUDA error 700");
  fake->fail_copy_number = 0;
}

void a_gpu_without_batches_falls_back(Random& random) {
  fake->batch_result = kNotSupported;
  for (int i = 0; i < 20; ++i) {
    Case made = make_case(random, i % 2 == 0, false, 200);
    EXPECT(copy(made, i % 2 != 0, KVSWAP_PATH_AUTO) == KVSWAP_OK);
    made.check();
    if (!made.targets.empty()) {
      EXPECT_REFUSED(copy(made, i % 2 != 0, KVSWAP_PATH_BATCH), KVSWAP_UNAVAILABLE, "does not support");
    }
  }
  fake->batch_result = kSuccess;
  allow_paths(kAll);
}

void host_memory_is_the_drivers() {
  EXPECT(kvswap_cuda_synchronize(kStream) == KVSWAP_OK);
  void* memory = nullptr;
  EXPECT(kvswap_cuda_host_alloc(8192, &memory) == KVSWAP_OK);
  std::memset(memory, 1, 8192);
  EXPECT(kvswap_cuda_host_free(memory) == KVSWAP_OK);
  static uint8_t own[4096];
  EXPECT(kvswap_cuda_host_register(own, sizeof(own)) == KVSWAP_OK);
  EXPECT(fake->registered == 8192 + 4096);
  EXPECT(kvswap_cuda_host_unregister(own) == KVSWAP_OK);
  EXPECT_REFUSED(kvswap_cuda_host_register(own, int64_t{1} << 50), KVSWAP_OUT_OF_MEMORY, "cuMemHostRegister");
  EXPECT_REFUSED(kvswap_cuda_host_register(nullptr, 1), KVSWAP_INVALID, "no host buffer");
  EXPECT_REFUSED(kvswap_cuda_host_alloc(0, &memory), KVSWAP_INVALID, "no host buffer");
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
  EXPECT(kvswap_cuda_available() == KVSWAP_OK);
  EXPECT(kvswap_cuda_has_path(KVSWAP_PATH_BATCH) == fake->has_batch);
  EXPECT(kvswap_cuda_has_path(KVSWAP_PATH_KERNEL) == 0);
  Random random(7);
  if (!fake->has_batch) {
    Case made = make_case(random, false, true, 64);
    EXPECT_REFUSED(copy(made, true, KVSWAP_PATH_BATCH), KVSWAP_UNAVAILABLE, "12.8");
    EXPECT(copy(made, true, KVSWAP_PATH_AUTO) == KVSWAP_OK);
    made.check();
    std::puts("cuda, old driver: all passed");
    return 0;
  }
  every_path_moves_every_byte(random);
  the_kernel_moves_every_byte(random);
  long_lists_are_cut();
  runs_at_equal_distances_move_every_byte();
  without_a_usable_kernel_auto_falls_back();
  rows_further_apart_than_a_2d_copy_may_go_one_by_one();
  rows_of_every_alignment_are_copied();
  memory_is_addressed_as_the_gpu_knows_it(random);
  wrong_arguments_submit_nothing(random);
  driver_errors_are_named(random);
  a_gpu_without_batches_falls_back(random);
  host_memory_is_the_drivers();
  std::puts("cuda, new driver: all passed");
}
