// The driver's own functions, as libcuda.so.1 exports them or hands them out by name.
#include <cstdlib>
#include <cstring>
#include <mutex>

#include "../../cuda/driver_types.h"
#include "copies.h"
#include "ipc.h"
#include "locked.h"

using kvswap::cuda::Memcpy2D;
using kvswap::cuda::MemcpyAttributes;
namespace fake {

std::recursive_mutex& lock() {
  static auto* one = new std::recursive_mutex;
  return *one;
}

namespace {

uint64_t handle(void* stream) { return reinterpret_cast<uint64_t>(stream); }

Result error_name(Result result, const char** name) {
  *name = result == kIllegalAddress ? "CUDA_ERROR_ILLEGAL_ADDRESS" : "CUDA_ERROR_OF_THE_FAKE";
  return kSuccess;
}

Result driver_version(int* version) { return *version = 12080, kSuccess; }
Result current_context(void** context) { return *context = &machine(), kSuccess; }
Result current_device(int* device) { return *device = 0, kSuccess; }

Result device_attribute(int* value, int attribute, int) {
  constexpr int kMultiprocessors = 16, kMajor = 75, kMinor = 76;
  const auto locked = hold();
  *value = 0;
  if (attribute == kMultiprocessors) *value = 16;
  if (attribute == kMajor) *value = 9;
  if (attribute == kMinor) *value = 0;
  return kSuccess;
}

Result pointer_attribute(void* found, int attribute, uint64_t address) {
  const auto locked = hold();
  if (attribute == kvswap::cuda::kOrdinalAttribute || attribute == kvswap::cuda::kIpcAttribute) {
    if (!machine().memory.is_device(address)) return kInvalidValue;
    const bool is_capable = machine().memory.is_exportable(address);
    return *static_cast<int*>(found) = attribute == kvswap::cuda::kIpcAttribute && is_capable ? 1 : 0, kSuccess;
  }
  if (attribute != kvswap::cuda::kDevicePointerAttribute) return kInvalidValue;
  const uint64_t known = machine().memory.device_address(address);
  if (known == 0) return kInvalidValue;
  *static_cast<uint64_t*>(found) = known;
  return kSuccess;
}

Result host_device_pointer(uint64_t* found, void* address, unsigned int) {
  return pointer_attribute(found, kvswap::cuda::kDevicePointerAttribute, reinterpret_cast<uint64_t>(address));
}

Result copy(uint64_t to, uint64_t of, size_t nbytes, void* stream) {
  const auto locked = hold();
  const size_t half = nbytes / 2;  // in two pieces, so that somebody may see half of it
  std::vector<Row> rows{{to, of, nbytes - half}};
  if (half != 0) rows.push_back({to + nbytes - half, of + nbytes - half, half});
  return submit_copy(handle(stream), std::move(rows), true, kInStreamOrder);
}

Result copy_2d(const Memcpy2D* copy, void* stream) {
  const auto locked = hold();
  constexpr auto kHost = kvswap::cuda::kHost;
  if (copy->source_pitch < copy->width || copy->target_pitch < copy->width ||
      copy->source_pitch > size_t{kvswap::cuda::kMaxPitch} || copy->target_pitch > size_t{kvswap::cuda::kMaxPitch}) {
    return machine().refuse(kInvalidValue, "a 2D copy with a pitch that no GPU takes");
  }
  const auto of = copy->source_type == kHost ? reinterpret_cast<uint64_t>(copy->source_host) : copy->source_device;
  const auto to = copy->target_type == kHost ? reinterpret_cast<uint64_t>(copy->target_host) : copy->target_device;
  std::vector<Row> rows;
  for (size_t row = 0; row < copy->height; ++row) {
    rows.push_back({to + row * copy->target_pitch, of + row * copy->source_pitch, copy->width});
  }
  return submit_copy(handle(stream), std::move(rows), true, kInStreamOrder);
}

Result copy_batch(uint64_t* to, uint64_t* of, size_t* sizes, size_t count, MemcpyAttributes* attributes,
                  size_t* attributes_from, size_t attribute_count, size_t* failed, void* stream) {
  const auto locked = hold();
  if (count == 0 || attribute_count != 1 || attributes_from[0] != 0 || failed == nullptr || handle(stream) <= 2 ||
      attributes->flags != 0) {
    return machine().refuse(kInvalidValue, "arguments of a batch that the driver refuses");
  }
  std::vector<Row> rows;
  for (size_t i = 0; i < count; ++i) rows.push_back({to[i], of[i], sizes[i]});
  const auto access = static_cast<Access>(attributes->source_access);
  return submit_copy(handle(stream), std::move(rows), false, access);
}

Result memory_alloc(uint64_t* address, size_t nbytes) {
  const auto locked = hold();
  const Result result = machine().enter();
  if (result == kSuccess) *address = machine().memory.allocate(nbytes, true);
  return result;
}

// Of a pool of the driver's own, whose memory no handle names.
Result memory_alloc_async(uint64_t* address, size_t nbytes, void*) {
  const auto locked = hold();
  return *address = machine().memory.allocate(nbytes, false), machine().enter();
}

// As an allocator with a pool frees: nobody waits for the device.
Result memory_free(uint64_t address) {
  const auto locked = hold();
  if (machine().memory.is_mapped_elsewhere(address)) {
    machine().refuse(kInvalidValue, "device memory freed that another process has mapped");
  }
  return machine().memory.free(address) ? kSuccess : machine().refuse(kInvalidValue, "device memory freed twice");
}

Result host_register(void* address, size_t nbytes, unsigned int) {
  const auto locked = hold();
  if (const Result result = machine().enter(); result != kSuccess) return result;
  const bool is_done = machine().memory.register_host(reinterpret_cast<uint64_t>(address), nbytes);
  return is_done ? kSuccess : machine().refuse(712, "host memory page-locked twice");
}

Result host_unregister(void* address) {
  const auto locked = hold();
  const bool is_done = machine().memory.unregister_host(reinterpret_cast<uint64_t>(address));
  return is_done ? kSuccess : machine().refuse(713, "host memory unlocked that was not locked");
}

Result host_alloc(void** address, size_t nbytes, unsigned int flags) {
  *address = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
  return *address == nullptr ? kOutOfMemory : host_register(*address, nbytes, flags);
}

Result host_free(void* address) {
  const Result result = host_unregister(address);
  if (result == kSuccess) std::free(address);
  return result;
}

Result stream_create(void** stream, unsigned int flags) {
  const auto locked = hold();
  *stream = reinterpret_cast<void*>(machine().new_stream((flags & 1) == 0));
  return machine().enter();
}

Result stream_destroy(void* stream) {
  return with([&] { return machine().end_stream(handle(stream)); });
}
Result stream_query(void* stream) {
  return with([&] { return machine().query_stream(handle(stream)); });
}
Result stream_synchronize(void* stream) {
  return with([&] { return machine().synchronize_stream(handle(stream)); });
}
Result stream_wait(void* stream, void* event, unsigned int) {
  return with([&] { return machine().wait(handle(stream), handle(event)); });
}

Result event_create(void** event, unsigned int flags) {
  constexpr unsigned int kDisableTiming = 2;
  const auto locked = hold();
  *event = reinterpret_cast<void*>(machine().new_event((flags & kDisableTiming) == 0));
  return machine().enter();
}

Result event_destroy(void* event) {
  return with([&] { return machine().end_event(handle(event)); });
}
Result event_record(void* event, void* stream) {
  return with([&] { return machine().record(handle(event), handle(stream)); });
}
Result event_query(void* event) {
  return with([&] { return machine().query_event(handle(event)); });
}
Result event_synchronize(void* event) {
  return with([&] { return machine().synchronize_event(handle(event)); });
}
Result event_elapsed(float* milliseconds, void* start, void* end) {
  return with([&] { return machine().elapsed(milliseconds, handle(start), handle(end)); });
}

Result memset_async(uint64_t address, unsigned char value, size_t nbytes, void* stream) {
  const auto fill = [=](size_t) {
    uint8_t* to = machine().memory.resolve(address, nbytes, Eyes::kCopy);
    if (to == nullptr) return kIllegalAddress;
    return std::memset(to, value, nbytes), kSuccess;
  };
  return with([&] { return machine().submit(handle(stream), {1, true, fill}); });
}

struct Entry {
  const char* name;
  int since;
  void* address;
};

#define ENTRY(name, since, function) {name, since, reinterpret_cast<void*>(function)}
const Entry entries[] = {
    ENTRY("cuGetErrorName", 6000, error_name),
    ENTRY("cuDriverGetVersion", 2020, driver_version),
    ENTRY("cuCtxGetCurrent", 4000, current_context),
    ENTRY("cuCtxGetDevice", 2000, current_device),
    ENTRY("cuDeviceGetAttribute", 2000, device_attribute),
    ENTRY("cuPointerGetAttribute", 4000, pointer_attribute),
    ENTRY("cuMemHostGetDevicePointer", 3020, host_device_pointer),
    ENTRY("cuMemcpyAsync", 4000, copy),
    ENTRY("cuMemcpy2DAsync", 3020, copy_2d),
    ENTRY("cuMemsetD8Async", 3020, memset_async),
    ENTRY("cuMemAlloc", 3020, memory_alloc),
    ENTRY("cuMemAllocAsync", 11020, memory_alloc_async),
    ENTRY("cuMemFree", 3020, memory_free),
    ENTRY("cuMemGetAddressRange", 3020, address_range),
    ENTRY("cuIpcGetMemHandle", 4010, ipc_export),
    ENTRY("cuIpcOpenMemHandle", 11000, ipc_open),
    ENTRY("cuIpcCloseMemHandle", 4010, ipc_close),
    ENTRY("cuDeviceGetCount", 2000, device_count),
    ENTRY("cuDeviceGet", 2000, device),
    ENTRY("cuDeviceGetUuid", 11040, device_uuid),
    ENTRY("cuDeviceCanAccessPeer", 4000, can_access_peer),
    ENTRY("cuMemHostAlloc", 2020, host_alloc),
    ENTRY("cuMemFreeHost", 2000, host_free),
    ENTRY("cuMemHostRegister", 6050, host_register),
    ENTRY("cuMemHostUnregister", 4000, host_unregister),
    ENTRY("cuStreamCreate", 2000, stream_create),
    ENTRY("cuStreamDestroy", 4000, stream_destroy),
    ENTRY("cuStreamQuery", 2000, stream_query),
    ENTRY("cuStreamSynchronize", 2000, stream_synchronize),
    ENTRY("cuStreamWaitEvent", 3020, stream_wait),
    ENTRY("cuEventCreate", 2000, event_create),
    ENTRY("cuEventDestroy", 4000, event_destroy),
    ENTRY("cuEventRecord", 2000, event_record),
    ENTRY("cuEventQuery", 2000, event_query),
    ENTRY("cuEventSynchronize", 2000, event_synchronize),
    ENTRY("cuEventElapsedTime", 2000, event_elapsed),
};
#undef ENTRY

}  // namespace
}  // namespace fake

extern "C" int cuGetProcAddress_v2(const char* name, void** address, int version, uint64_t, int* status) {
  *address = nullptr;
  if (std::strcmp(name, "cuMemcpyBatchAsync") == 0 && version == 12080) {
    *address = reinterpret_cast<void*>(fake::copy_batch);
  }
  for (const auto& entry : fake::entries) {
    if (std::strcmp(name, entry.name) == 0 && version >= entry.since) *address = entry.address;
  }
  if (status != nullptr) *status = *address == nullptr ? 1 : 0;
  return *address == nullptr ? 500 : fake::kSuccess;
}
