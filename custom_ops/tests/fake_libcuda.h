// What the tests tell the fake driver, and what it tells them.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct FakeCuda {
  // Set by a test.
  int has_context;
  int has_batch;
  int batch_result;        // of every cuMemcpyBatchAsync
  int is_pageable;         // host memory is not page-locked: kernels cannot reach it
  uint64_t kernel_offset;  // kernels find host memory so many bytes further
  int fail_copy_number;    // this copy (from 1) fails with 700; 0: none
  // Counted by the driver.
  int copies, copies_2d, batches;
  size_t largest_batch;
  int64_t registered;
  uint64_t last_stream;
  int other_streams;  // calls on another stream than the first one's
};
// In the fake libcuda.so.1 only.
FakeCuda* fake_cuda(void);
}
