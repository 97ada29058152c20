// Device memory of other processes, and which GPUs there are.
#include "ipc.h"

#include <unistd.h>

#include <cstring>
#include <map>

#include "locked.h"

namespace fake {
namespace {

struct Gpus {
  int own = 1, other = 0;  // their names; 0: there is no other one
  bool reach_each_other = true;
};
Gpus gpus;

struct Mapping {
  uint64_t base;
  int count;
};
std::map<std::pair<pid_t, uint64_t>, Mapping> mappings;

SharedName name_in(const IpcHandle& handle) {
  SharedName name{};
  static_assert(sizeof(name) <= sizeof(handle.bytes));
  std::memcpy(&name, handle.bytes, sizeof(name));
  return name;
}

}  // namespace

Result address_range(uint64_t* base, size_t* nbytes, uint64_t address) {
  const auto locked = hold();
  const Extent found = machine().memory.extent(address);
  if (found.nbytes == 0) return kNotFound;
  *base = found.base;
  *nbytes = found.nbytes;
  return machine().enter();
}

Result ipc_export(IpcHandle* handle, uint64_t address) {
  const auto locked = hold();
  if (const Result result = machine().enter(); result != kSuccess) return result;
  const auto shared = machine().memory.share(address);
  if (shared == nullptr) return kInvalidValue;
  SharedName name = shared->name();
  name.device = gpus.own;
  std::memset(handle->bytes, 0, sizeof(handle->bytes));
  std::memcpy(handle->bytes, &name, sizeof(name));
  return kSuccess;
}

// The same memory again has the same address, and is closed as often as it was opened.
Result ipc_open(uint64_t* address, IpcHandle handle, unsigned int flags) {
  const auto locked = hold();
  if (const Result result = machine().enter(); result != kSuccess) return result;
  const SharedName name = name_in(handle);
  if (flags != kvswap::cuda::kIpcPeerAccess) return machine().refuse(kInvalidValue, "a mapping without its flag");
  if (name.process == getpid()) return kInvalidContext;
  if (name.device != gpus.own && !gpus.reach_each_other) return kPeerUnsupported;
  auto& mapping = mappings[{name.process, name.serial}];
  if (mapping.count == 0) {
    const auto shared = Shared::open(name);
    if (shared == nullptr) return kInvalidValue;
    mapping.base = machine().memory.map(shared);
  }
  ++mapping.count;
  *address = mapping.base;
  return kSuccess;
}

Result ipc_close(uint64_t address) {
  const auto locked = hold();
  if (const Result result = machine().enter(); result != kSuccess) return result;
  for (auto& [name, mapping] : mappings) {
    if (mapping.count > 0 && mapping.base == address) {
      if (--mapping.count == 0) machine().memory.unmap(address);
      return kSuccess;
    }
  }
  return machine().refuse(kInvalidValue, "memory of another process closed that was not open");
}

Result device_count(int* count) { return *count = gpus.other == 0 ? 1 : 2, kSuccess; }

Result device(int* handle, int ordinal) {
  if (ordinal < 0 || ordinal > (gpus.other == 0 ? 0 : 1)) return kInvalidDevice;
  return *handle = ordinal, kSuccess;
}

Result device_uuid(Uuid* uuid, int handle) {
  std::memset(uuid->bytes, handle == 0 ? gpus.own : gpus.other, sizeof(uuid->bytes));
  return kSuccess;
}

// None is its own peer.
Result can_access_peer(int* can, int device, int peer) {
  return *can = gpus.reach_each_other && device != peer ? 1 : 0, kSuccess;
}

}  // namespace fake

extern "C" {

// The GPU of this process is called `own`, another one that it sees `other` (0: none), and whether it reaches others.
void fake_gpus(int own, int other, int reach_each_other) {
  fake::with([&] { fake::gpus = {own, other, reach_each_other != 0}; });
}

// Allocations of other processes that are mapped here.
uint64_t fake_num_mapped(void) {
  return fake::with([] {
    uint64_t open = 0;
    for (const auto& [name, mapping] : fake::mappings) open += mapping.count > 0 ? 1 : 0;
    return open;
  });
}
}
