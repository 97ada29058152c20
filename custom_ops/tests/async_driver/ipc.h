// The driver's functions for memory of other processes.
#pragma once

#include "../../cuda/driver_types.h"
#include "machine.h"

namespace fake {

using kvswap::cuda::IpcHandle;
using kvswap::cuda::Uuid;

Result address_range(uint64_t* base, size_t* nbytes, uint64_t address);
Result ipc_export(IpcHandle* handle, uint64_t address);
Result ipc_open(uint64_t* address, IpcHandle handle, unsigned int flags);
Result ipc_close(uint64_t address);
Result device_count(int* count);
Result device(int* handle, int ordinal);
Result device_uuid(Uuid* uuid, int handle);
Result can_access_peer(int* can, int device, int peer);

}  // namespace fake
