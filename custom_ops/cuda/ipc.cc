// Device memory that another process of this machine maps, and who can map whose.
#include <cstring>

#include "driver.h"

namespace kvswap::cuda {
namespace {

const Driver& driver_with_ipc() {
  const Driver& found = driver_with_context();
  if (!found.has_ipc()) throw Error(KVSWAP_UNAVAILABLE, "this CUDA driver cannot share memory between processes");
  return found;
}

[[noreturn]] void refuse_export(const char* call, Result result) {
  throw Error(KVSWAP_UNAVAILABLE,
              format("this GPU memory cannot be shared with another process (%s: CUDA error %d)", call, result));
}

// A no that leaves the context as it was.
bool is_refusal(Result result) {
  constexpr Result kInvalidValue = 1, kInvalidContext = 201, kMapFailed = 205, kAlreadyMapped = 208,
                   kPeerUnsupported = 217, kInvalidHandle = 400, kNotFound = 500, kTooManyPeers = 711,
                   kNotPermitted = 800;
  for (Result each : {kInvalidValue, kInvalidContext, kMapFailed, kAlreadyMapped, kPeerUnsupported, kInvalidHandle,
                      kNotFound, kTooManyPeers, kNotPermitted, kNotSupported}) {
    if (result == each) return true;
  }
  return false;
}

void check_export(const Driver& cuda, Result result, const char* call) {
  if (is_refusal(result)) refuse_export(call, result);
  check(cuda, result, call);
}

kvswap_ipc_memory exported(DevicePointer address) {
  const Driver& cuda = driver_with_ipc();
  // Drivers that do not know the question answer nothing; then the export itself tells.
  int is_capable = 1;
  if (cuda.pointer_attribute(&is_capable, kIpcAttribute, address) == kSuccess && is_capable == 0) {
    throw Error(KVSWAP_UNAVAILABLE, "this GPU memory cannot be shared with another process");
  }
  DevicePointer base = 0;
  size_t nbytes = 0;
  check_export(cuda, cuda.address_range(&base, &nbytes, address), "cuMemGetAddressRange");
  IpcHandle handle{};
  check_export(cuda, cuda.ipc_export(&handle, base), "cuIpcGetMemHandle");
  kvswap_ipc_memory made{};
  static_assert(sizeof(made.handle) == sizeof(handle));
  std::memcpy(made.handle, &handle, sizeof(handle));
  made.base = base;
  made.nbytes = static_cast<int64_t>(nbytes);
  return made;
}

DevicePointer opened(const uint8_t* bytes) {
  const Driver& cuda = driver_with_ipc();
  IpcHandle handle{};
  std::memcpy(&handle, bytes, sizeof(handle));
  DevicePointer base = 0;
  const Result result = cuda.ipc_open(&base, handle, kIpcPeerAccess);
  if (is_refusal(result)) {
    throw Error(KVSWAP_UNAVAILABLE, format("cuIpcOpenMemHandle: CUDA error %d", result));
  }
  check(cuda, result, "cuIpcOpenMemHandle");
  return base;
}

int access_between(int device, const uint8_t* uuid) {
  const Driver& cuda = driver_with_ipc();
  int count = 0, own = 0;
  check(cuda, cuda.device_count(&count), "cuDeviceGetCount");
  check(cuda, cuda.device(&own, device), "cuDeviceGet");
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    int other = 0, can = 0;
    Uuid name{};
    check(cuda, cuda.device(&other, ordinal), "cuDeviceGet");
    check(cuda, cuda.device_uuid(&name, other), "cuDeviceGetUuid");
    if (std::memcmp(name.bytes, uuid, sizeof(name.bytes)) != 0) continue;
    if (other == own) return 1;
    check(cuda, cuda.can_access_peer(&can, own, other), "cuDeviceCanAccessPeer");
    return can == 0 ? 0 : 1;
  }
  return -1;
}

}  // namespace
}  // namespace kvswap::cuda

int kvswap_cuda_ipc_export(uint64_t address, kvswap_ipc_memory* memory) {
  return kvswap::guarded([&] { *memory = kvswap::cuda::exported(address); });
}

int kvswap_cuda_ipc_open(const uint8_t* handle, uint64_t* base) {
  return kvswap::guarded([&] { *base = kvswap::cuda::opened(handle); });
}

int kvswap_cuda_ipc_close(uint64_t base) {
  return kvswap::guarded([&] {
    const auto& cuda = kvswap::cuda::driver_with_ipc();
    kvswap::cuda::check(cuda, cuda.ipc_close(base), "cuIpcCloseMemHandle");
  });
}

int kvswap_cuda_device_of(uint64_t address, int* device, uint8_t* uuid) {
  return kvswap::guarded([&] {
    const auto& cuda = kvswap::cuda::driver();
    if (!cuda.has_ipc()) throw kvswap::Error(KVSWAP_UNAVAILABLE, "this CUDA driver cannot name its GPUs");
    int ordinal = 0, handle = 0;
    kvswap::cuda::Uuid name{};
    using kvswap::cuda::check;
    check(cuda, cuda.pointer_attribute(&ordinal, kvswap::cuda::kOrdinalAttribute, address), "cuPointerGetAttribute");
    check(cuda, cuda.device(&handle, ordinal), "cuDeviceGet");
    check(cuda, cuda.device_uuid(&name, handle), "cuDeviceGetUuid");
    *device = ordinal;
    std::memcpy(uuid, name.bytes, sizeof(name.bytes));
  });
}

int kvswap_cuda_reaches(int device, const uint8_t* uuid, int* access) {
  return kvswap::guarded([&] { *access = kvswap::cuda::access_between(device, uuid); });
}
