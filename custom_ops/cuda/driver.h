// The CUDA driver library, found at run time.
#pragma once

#include "../core/error.h"
#include "driver_types.h"

namespace kvswap::cuda {

struct Driver {
  Result (*get_error_name)(Result, const char**) = nullptr;
  Result (*get_context)(Context*) = nullptr;
  Result (*pointer_attribute)(void*, int, DevicePointer) = nullptr;
  Result (*copy)(DevicePointer, DevicePointer, size_t, Stream) = nullptr;
  Result (*copy_2d)(const Memcpy2D*, Stream) = nullptr;
  // The 12.8 form of cuMemcpyBatchAsync; null before that.
  Result (*copy_batch)(DevicePointer*, DevicePointer*, size_t*, size_t, MemcpyAttributes*, size_t*, size_t, size_t*,
                       Stream) = nullptr;
  Result (*synchronize)(Stream) = nullptr;
  Result (*host_alloc)(void**, size_t, unsigned int) = nullptr;
  Result (*host_free)(void*) = nullptr;
  Result (*host_register)(void*, size_t, unsigned int) = nullptr;
  Result (*host_unregister)(void*) = nullptr;
  // For STAGED only, which is left where one of them is missing.
  Result (*event_create)(Event*, unsigned int) = nullptr;
  Result (*event_record)(Event, Stream) = nullptr;
  Result (*wait_event)(Stream, Event, unsigned int) = nullptr;
  // For memory of other processes only; `has_ipc` where all of them are there.
  Result (*address_range)(DevicePointer*, size_t*, DevicePointer) = nullptr;
  Result (*ipc_export)(IpcHandle*, DevicePointer) = nullptr;
  Result (*ipc_open)(DevicePointer*, IpcHandle, unsigned int) = nullptr;
  Result (*ipc_close)(DevicePointer) = nullptr;
  Result (*device_count)(int*) = nullptr;
  Result (*device)(int*, int) = nullptr;
  Result (*device_uuid)(Uuid*, int) = nullptr;
  Result (*can_access_peer)(int*, int, int) = nullptr;

  bool has_ipc() const {
    return address_range != nullptr && ipc_export != nullptr && ipc_open != nullptr && ipc_close != nullptr &&
           device_count != nullptr && device != nullptr && device_uuid != nullptr && can_access_peer != nullptr;
  }
};

// Throws KVSWAP_UNAVAILABLE, with the reason, where there is none.
const Driver& driver();
// Throws KVSWAP_UNAVAILABLE when this thread has no current context.
const Driver& driver_with_context();
// Throws KVSWAP_DRIVER, or KVSWAP_OUT_OF_MEMORY, naming the call and CUDA's error, and whether the context is lost.
void check(const Driver& driver, Result result, const char* call);

}  // namespace kvswap::cuda
