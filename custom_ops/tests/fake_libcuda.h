// What the tests tell the fake driver, and what it tells them.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct FakeCuda {
  // Set by a test.
  int has_context = 1;
  int has_batch = 1;
  int batch_result = 0;        // of every cuMemcpyBatchAsync
  int is_pageable = 0;         // host memory is not page-locked: kernels cannot reach it
  uint64_t kernel_offset = 0;  // the GPU knows all memory by addresses so many bytes further
  int fail_copy_number = 0;    // this copy (from 1) fails with 700; 0: none
  // Counted by the driver.
  int copies = 0, copies_2d = 0, batches = 0;
  size_t largest_batch = 0;
  int64_t registered = 0;
  uint64_t last_stream = 0;
  int other_streams = 0;  // calls on another stream than the first one's
  int count_only = 0;     // set by a test: no byte moves, for memory that is not there
  int unified_2d = 0;     // 2D copies whose addresses said themselves which memory they mean
  int event_waits = 0, event_records = 0;
  int calls = 0;        // of copies, whatever their number inside
  int descriptors = 0;  // inside batches
  int batch_fault = 0;  // set by a test; 1: other bytes arrive, 2: the call never returns
};
// In the fake libcuda.so.1 only.
FakeCuda* fake_cuda(void);
}
