// A libcuda.so.1 for machines without a GPU: the functions this package uses, on host memory. No simulator of CUDA:
// copies happen at once. It is strict about what the documentation demands of a caller.
#include "fake_libcuda.h"

#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "../cuda/driver_types.h"

using namespace kvswap::cuda;

namespace {

FakeCuda state;

constexpr Result kInvalidValue = 1, kIllegalAddress = 700;

bool note(Stream stream) {
  const auto handle = reinterpret_cast<uint64_t>(stream);
  if (handle <= 1) return false;
  if (state.last_stream != 0 && state.last_stream != handle) ++state.other_streams;
  state.last_stream = handle;
  return true;
}

void* real(DevicePointer address) {
  const bool is_alias = state.kernel_offset != 0 && address >= state.kernel_offset;
  return reinterpret_cast<void*>(is_alias ? address - state.kernel_offset : address);
}

Result copy_one(DevicePointer to, DevicePointer of, size_t nbytes) {
  if (++state.copies == state.fail_copy_number) return kIllegalAddress;
  if (state.count_only == 0) std::memcpy(real(to), real(of), nbytes);
  return kSuccess;
}

Result error_name(Result result, const char** name) {
  *name = result == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OTHER";
  return kSuccess;
}

Result get_context(Context* context) {
  *context = state.has_context ? &state : nullptr;
  return kSuccess;
}

Result pointer_attribute(void* found, int attribute, DevicePointer address) {
  if (attribute != kDevicePointerAttribute || state.is_pageable) return kInvalidValue;
  *static_cast<DevicePointer*>(found) = address + state.kernel_offset;
  return kSuccess;
}

Result copy_async(DevicePointer to, DevicePointer of, size_t nbytes, Stream stream) {
  ++state.calls;
  return note(stream) ? copy_one(to, of, nbytes) : kInvalidValue;
}

Result copy_2d(const Memcpy2D* copy, Stream stream) {
  const bool is_unified = copy->source_type == kUnified && copy->target_type == kUnified;
  if (!note(stream) || (copy->source_type == copy->target_type && !is_unified) || copy->source_pitch < copy->width ||
      copy->target_pitch < copy->width || copy->source_pitch > size_t{kMaxPitch} ||
      copy->target_pitch > size_t{kMaxPitch}) {
    return kInvalidValue;
  }
  const auto of = copy->source_type == kHost ? reinterpret_cast<uint64_t>(copy->source_host) : copy->source_device;
  const auto to = copy->target_type == kHost ? reinterpret_cast<uint64_t>(copy->target_host) : copy->target_device;
  ++state.copies_2d;
  ++state.calls;
  if (is_unified) ++state.unified_2d;
  for (size_t row = 0; row < copy->height && state.count_only == 0; ++row) {
    const Result result = copy_one(to + row * copy->target_pitch, of + row * copy->source_pitch, copy->width);
    if (result != kSuccess) return result;
  }
  return kSuccess;
}

// Backwards, because a batch promises no order.
Result copy_batch(DevicePointer* to, DevicePointer* of, size_t* sizes, size_t count, MemcpyAttributes* attributes,
                  size_t* attributes_from, size_t attribute_count, size_t* failed, Stream stream) {
  if (state.batch_result != kSuccess) return state.batch_result;
  while (state.batch_fault == 2) pause();
  if (!note(stream) || count == 0 || attribute_count != 1 || attributes_from[0] != 0 || failed == nullptr ||
      attributes->source_access != kInStreamOrder || attributes->flags != 0) {
    return kInvalidValue;
  }
  ++state.batches;
  ++state.calls;
  state.descriptors += static_cast<int>(count);
  if (count > state.largest_batch) state.largest_batch = count;
  for (size_t i = count; state.count_only == 0 && i-- > 0;) {
    if (state.batch_fault == 1 && i == 0) continue;
    const Result result = copy_one(to[i], of[i], sizes[i]);
    if (result != kSuccess) {
      *failed = i;
      return result;
    }
  }
  return kSuccess;
}

Result synchronize(Stream stream) { return note(stream) ? kSuccess : kInvalidValue; }

Result host_alloc(void** address, size_t nbytes, unsigned int) {
  *address = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  state.registered += static_cast<int64_t>(nbytes);
  return kSuccess;
}

Result host_free(void* address) {
  std::free(address);
  return kSuccess;
}

Result host_register(void*, size_t nbytes, unsigned int) {
  if (nbytes > (size_t{1} << 40)) return 2;
  state.registered += static_cast<int64_t>(nbytes);
  return kSuccess;
}

Result host_unregister(void*) {
  state.registered = 0;
  return kSuccess;
}

Result event_create(Event* event, unsigned int flags) {
  static int made = 0;
  *event = reinterpret_cast<void*>(static_cast<uint64_t>(++made));
  return flags == kEventWithoutTiming ? kSuccess : kInvalidValue;
}

Result event_record(Event event, Stream stream) {
  ++state.event_records;
  return event != nullptr && note(stream) ? kSuccess : kInvalidValue;
}

Result wait_event(Stream stream, Event event, unsigned int flags) {
  ++state.event_waits;
  return event != nullptr && flags == 0 && note(stream) ? kSuccess : kInvalidValue;
}

struct Entry {
  const char* name;
  int since;
  void* address;
};

const Entry entries[] = {
    {"cuGetErrorName", 6000, reinterpret_cast<void*>(error_name)},
    {"cuCtxGetCurrent", 4000, reinterpret_cast<void*>(get_context)},
    {"cuPointerGetAttribute", 4000, reinterpret_cast<void*>(pointer_attribute)},
    {"cuMemcpyAsync", 4000, reinterpret_cast<void*>(copy_async)},
    {"cuMemcpy2DAsync", 3020, reinterpret_cast<void*>(copy_2d)},
    {"cuStreamSynchronize", 2000, reinterpret_cast<void*>(synchronize)},
    {"cuMemHostAlloc", 2020, reinterpret_cast<void*>(host_alloc)},
    {"cuMemFreeHost", 2000, reinterpret_cast<void*>(host_free)},
    {"cuMemHostRegister", 6050, reinterpret_cast<void*>(host_register)},
    {"cuEventCreate", 2000, reinterpret_cast<void*>(event_create)},
    {"cuEventRecord", 2000, reinterpret_cast<void*>(event_record)},
    {"cuStreamWaitEvent", 3020, reinterpret_cast<void*>(wait_event)},
    {"cuMemHostUnregister", 4000, reinterpret_cast<void*>(host_unregister)},
};

}  // namespace

extern "C" {

FakeCuda* fake_cuda(void) { return &state; }

Result cuGetProcAddress_v2(const char* name, void** address, int version, uint64_t, int* status) {
  *status = 1;
  *address = nullptr;
  // Whoever asks as 13.0 gets a function with other arguments: this package must ask as 12.8.
  if (std::strcmp(name, "cuMemcpyBatchAsync") == 0 && state.has_batch && version == 12080) {
    *address = reinterpret_cast<void*>(copy_batch);
  }
  for (const auto& entry : entries) {
    if (std::strcmp(name, entry.name) == 0 && version >= entry.since) *address = entry.address;
  }
  if (*address == nullptr) return 500;
  *status = 0;
  return kSuccess;
}
}
