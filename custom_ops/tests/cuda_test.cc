// The host side of GPU copies against a fake driver, and the kernel's body on the CPU. Shows nothing about a GPU.
#include <dlfcn.h>

#include "../cuda/paths.h"
#include "case.h"
#include "fake_libcuda.h"

using namespace kvswap::cuda;

namespace {

FakeCuda* fake = nullptr;
int launches = 0;

constexpr uint64_t kStream = 0x1000;

// A GPU would run the groups and threads in any order: so forwards and backwards.
int launch_on_cpu(const KernelArguments* arguments, int groups, int threads, void* stream) {
  EXPECT(reinterpret_cast<uint64_t>(stream) == kStream);
  EXPECT(groups >= 1 && groups <= kKernelGroups && threads == kKernelThreads);
  ++launches;
  for (int i = 0; i < groups; ++i) {
    for (int j = 0; j < threads; ++j) {
      const bool backwards = launches % 2 == 0;
      copy_rows(*arguments, {backwards ? groups - 1 - i : i, groups, backwards ? threads - 1 - j : j, threads});
    }
  }
  return kSuccess;
}

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
  for (int i = 0; i < 40; ++i) {
    Case made = make_case(random, i % 2 == 0, true, i % 8 == 0 ? 40000 : 700);
    kvswap_plan* plan = make_plan(made);
    const auto& runs = *plan->plan;
    const auto rows = kvswap::checked_entries(made.target.rows.data(), made.source.rows.data(), made.entries(), runs);
    const bool aligned = fits_kernel(rows, runs);
    if (aligned && !runs.runs.empty()) {
      copy_by_kernel(launch_on_cpu, rows, runs, reinterpret_cast<void*>(kStream));
      made.check();
    }
    kvswap_plan_free(plan);
  }
  EXPECT(launches > 20);
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
  copy_by_kernel(launch_on_cpu, rows, *plan->plan, reinterpret_cast<void*>(kStream));
  EXPECT(launches == (kSlots + kKernelRuns - 1) / kKernelRuns);
  for (int64_t i = 0; i < kSlots; ++i) EXPECT(target[(kSlots - 1 - i) * kWidth] == i % 251);
  fake->batches = 0;
  EXPECT(kvswap_cuda_copy(&to, &of, 1, plan, 1, KVSWAP_PATH_BATCH, kStream) == KVSWAP_OK);
  EXPECT(fake->batches == 3 && fake->largest_batch == 4096);
  kvswap_plan_free(plan);
}

void paths_are_chosen_by_size_count_and_contiguity() {
  const auto choose = [](int64_t width, int64_t runs, int64_t blocks_per_run, bool has_batch, bool has_kernel) {
    kvswap::Entries entries{{{4096, 1 << 20, width, width}, {uint64_t{1} << 50, 1 << 20, width, 4 * width}}};
    std::vector<kvswap_run> list;
    for (int64_t i = 0; i < runs; ++i) list.push_back({2 * i * blocks_per_run, i * blocks_per_run, blocks_per_run});
    return choose_path(entries, kvswap::checked_plan(list), has_batch, has_kernel);
  };
  EXPECT(choose(4096, 2, 1, true, true) == KVSWAP_PATH_RUNS);
  EXPECT(choose(4096, 200, 1, true, true) == KVSWAP_PATH_KERNEL);
  EXPECT(choose(4096, 200, 8, true, true) == KVSWAP_PATH_BATCH);
  EXPECT(choose(4096, 200, 1, true, false) == KVSWAP_PATH_BATCH);
  EXPECT(choose(4098, 200, 1, true, true) == KVSWAP_PATH_BATCH);
  EXPECT(choose(65536, 200, 1, true, true) == KVSWAP_PATH_BATCH);
  EXPECT(choose(65536, 200, 1, false, true) == KVSWAP_PATH_RUNS);
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
  EXPECT_REFUSED(copy(made, true, KVSWAP_PATH_RUNS), KVSWAP_DRIVER, "CUDA error 700 (CUDA_ERROR_ILLEGAL_ADDRESS)");
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
  paths_are_chosen_by_size_count_and_contiguity();
  wrong_arguments_submit_nothing(random);
  driver_errors_are_named(random);
  a_gpu_without_batches_falls_back(random);
  host_memory_is_the_drivers();
  std::puts("cuda, new driver: all passed");
}
