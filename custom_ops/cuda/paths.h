// How a GPU copy is made of driver calls and kernel launches.
#pragma once

#include <vector>

#include "../core/plan.h"
#include "driver.h"
#include "kernel.h"

namespace kvswap::cuda {

// The kernel's launch, null where _core_cuda.so is missing, does not load or comes from other sources.
KernelLaunch kernel_launch();

// One checked copy of at least one block, before it is known how its bytes move.
struct Copy {
  const Driver& driver;
  KernelLaunch launch;  // may be null
  Entries entries;      // the host side by the address that the GPU knows it by
  const Plan& plan;
  bool to_device;
  bool is_page_locked;  // kernels can reach the host side
  bool has_alias;       // the GPU's address of some host memory is not the host's
  Stream stream;
};

// Page-locked memory may have another address on the GPU. Where it has none, the copy keeps the host's.
Copy make_copy(const Driver& driver, KernelLaunch launch, const Entries& entries, const Plan& plan, bool to_device,
               Stream stream);

// Whether the kernel can do this copy: it exists, reaches the memory, and the slots fit 32 bits.
bool fits_kernel(const Copy& copy);
// Whether the entries of a host block are one range, and some blocks of it fit the staging memory.
bool fits_staging(const Copy& copy);
int64_t blocks_in_staging(int64_t block_bytes);
int64_t block_bytes(const Entries& entries);  // of all entries together
int access_bytes(const Entry& entry);         // of the kernel: the widest that both sides allow

constexpr uint64_t kLegacyStream = 1;  // CU_STREAM_LEGACY

constexpr int64_t kBatchCopies = 4096;  // drivers were seen to crash at 51,828

void copy_by_runs(const Copy& copy);
// These three are false, nothing submitted, when this driver or GPU does not do it after all.
bool copy_by_batch(const Copy& copy);
bool copy_by_kernel(const Copy& copy);
bool copy_staged(const Copy& copy);
// As `copy_by_batch`, for copies that are listed already; the driver wants to write to none of the lists.
bool submit_batches(const Driver& driver, std::vector<DevicePointer>& targets, std::vector<DevicePointer>& sources,
                    std::vector<size_t>& sizes, Stream stream);
int kernel_refusal();  // the CUDA error with which a launch was refused last; 0: none was

// Copies on `path`, or on what AUTO chooses.
void enqueue(const Copy& copy, int path);

}  // namespace kvswap::cuda
