// How a GPU copy is made of driver calls and kernel launches.
#pragma once

#include "../core/plan.h"
#include "driver.h"
#include "kernel.h"

namespace kvswap::cuda {

// The kernel's launch, null where _core_cuda.so is missing or does not load.
KernelLaunch kernel_launch();

// Whether every row starts and ends on a 16-byte border and the slots fit 32 bits.
bool fits_kernel(const Entries& entries, const Plan& plan);
// What AUTO chooses.
int choose_path(const Entries& entries, const Plan& plan, bool has_batch, bool has_kernel);

void copy_by_runs(const Driver& driver, const Entries& entries, const Plan& plan, bool to_device, Stream stream);
// False, nothing submitted, when this driver does not do batches after all.
bool copy_by_batch(const Driver& driver, const Entries& entries, const Plan& plan, Stream stream);
void copy_by_kernel(KernelLaunch launch, const Entries& entries, const Plan& plan, Stream stream);

}  // namespace kvswap::cuda
