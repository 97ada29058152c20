#include "driver.h"

#include <dlfcn.h>

#include <algorithm>
#include <iterator>

namespace kvswap::cuda {
namespace {

constexpr int kBaseVersion = 11030;  // cuGetProcAddress itself
constexpr int kUuidVersion = 11040;
constexpr int kBatchVersion = 12080;  // this very form of cuMemcpyBatchAsync; 13.0 exports another under the name
constexpr Result kOutOfMemory = 2;

// cuGetProcAddress_v2 takes one argument more than cuGetProcAddress, which ignores it.
using GetProcAddress = Result (*)(const char*, void**, int, uint64_t, int*);

struct Loaded {
  Driver driver;
  std::string problem;
};

template <typename Function>
bool find(GetProcAddress get, const char* name, int version, Function*& function) {
  void* address = nullptr;
  int status = 0;
  if (get(name, &address, version, 0, &status) != kSuccess || address == nullptr) return false;
  function = reinterpret_cast<Function*>(address);
  return true;
}

Loaded load() {
  Loaded loaded;
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    loaded.problem = "there is no CUDA driver (libcuda.so.1)";
    return loaded;
  }
  void* get_address = dlsym(library, "cuGetProcAddress_v2");
  if (get_address == nullptr) get_address = dlsym(library, "cuGetProcAddress");
  if (get_address == nullptr) {
    loaded.problem = "the CUDA driver is older than 11.3";
    return loaded;
  }
  const auto get = reinterpret_cast<GetProcAddress>(get_address);
  auto& driver = loaded.driver;
  const bool complete = find(get, "cuGetErrorName", kBaseVersion, driver.get_error_name) &&
                        find(get, "cuCtxGetCurrent", kBaseVersion, driver.get_context) &&
                        find(get, "cuPointerGetAttribute", kBaseVersion, driver.pointer_attribute) &&
                        find(get, "cuMemcpyAsync", kBaseVersion, driver.copy) &&
                        find(get, "cuMemcpy2DAsync", kBaseVersion, driver.copy_2d) &&
                        find(get, "cuStreamSynchronize", kBaseVersion, driver.synchronize) &&
                        find(get, "cuMemHostAlloc", kBaseVersion, driver.host_alloc) &&
                        find(get, "cuMemFreeHost", kBaseVersion, driver.host_free) &&
                        find(get, "cuMemHostRegister", kBaseVersion, driver.host_register) &&
                        find(get, "cuMemHostUnregister", kBaseVersion, driver.host_unregister);
  if (!complete) loaded.problem = "the CUDA driver lacks a function";
  find(get, "cuMemcpyBatchAsync", kBatchVersion, driver.copy_batch);
  find(get, "cuEventCreate", kBaseVersion, driver.event_create);
  find(get, "cuEventRecord", kBaseVersion, driver.event_record);
  find(get, "cuStreamWaitEvent", kBaseVersion, driver.wait_event);
  find(get, "cuMemGetAddressRange", kBaseVersion, driver.address_range);
  find(get, "cuIpcGetMemHandle", kBaseVersion, driver.ipc_export);
  find(get, "cuIpcOpenMemHandle", kBaseVersion, driver.ipc_open);
  find(get, "cuIpcCloseMemHandle", kBaseVersion, driver.ipc_close);
  find(get, "cuDeviceGetCount", kBaseVersion, driver.device_count);
  find(get, "cuDeviceGet", kBaseVersion, driver.device);
  find(get, "cuDeviceCanAccessPeer", kBaseVersion, driver.can_access_peer);
  // Since 11.4 it tells the parts of a divided GPU apart.
  if (!find(get, "cuDeviceGetUuid", kUuidVersion, driver.device_uuid)) {
    find(get, "cuDeviceGetUuid", kBaseVersion, driver.device_uuid);
  }
  return loaded;
}

// Errors after which the context is gone, and with it every later call: broken accesses and launches, a GPU that fell
// off the bus, uncorrectable memory.
bool is_sticky(Result result) {
  constexpr Result kSticky[] = {4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 720, 721};
  return std::find(std::begin(kSticky), std::end(kSticky), result) != std::end(kSticky);
}

}  // namespace

const Driver& driver() {
  static const Loaded loaded = load();
  if (!loaded.problem.empty()) throw Error(KVSWAP_UNAVAILABLE, loaded.problem);
  return loaded.driver;
}

const Driver& driver_with_context() {
  const Driver& found = driver();
  Context context = nullptr;
  const Result result = found.get_context(&context);
  if (result != kSuccess || context == nullptr) {
    throw Error(KVSWAP_UNAVAILABLE, "no CUDA context is current on this thread: choose a device first");
  }
  return found;
}

void check(const Driver& driver, Result result, const char* call) {
  if (result == kSuccess) return;
  const char* name = nullptr;
  if (driver.get_error_name(result, &name) != kSuccess || name == nullptr) name = "unknown";
  throw Error(result == kOutOfMemory ? KVSWAP_OUT_OF_MEMORY : KVSWAP_DRIVER,
              format("%s: CUDA error %d (%s)%s", call, result, name,
                     is_sticky(result) ? "; the CUDA context of this process is lost: restart the worker" : ""));
}

}  // namespace kvswap::cuda
