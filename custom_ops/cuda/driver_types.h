// The few types of the CUDA driver API that are used here, so that building needs no CUDA toolkit.
// tests/driver_types_test.cc compares them with cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvswap::cuda {

using Result = int;
using Stream = void*;
using Context = void*;
using Event = void*;
using DevicePointer = unsigned long long;

constexpr Result kSuccess = 0;
constexpr Result kNotSupported = 801;

// kUnified: an address that says by itself which memory it means.
enum MemoryType : int { kHost = 1, kDevice = 2, kUnified = 4 };

// CUDA_MEMCPY2D
struct Memcpy2D {
  size_t source_x, source_y;
  MemoryType source_type;
  const void* source_host;
  DevicePointer source_device;
  void* source_array;
  size_t source_pitch;
  size_t target_x, target_y;
  MemoryType target_type;
  void* target_host;
  DevicePointer target_device;
  void* target_array;
  size_t target_pitch;
  size_t width, height;
};

// CUmemcpySrcAccessOrder. ANY would let the copy read its source before earlier work of the stream is done.
enum SourceAccess : int { kInStreamOrder = 1 };

struct Location {
  int type, id;
};

// CUmemcpyAttributes
struct MemcpyAttributes {
  SourceAccess source_access;
  Location source_hint, target_hint;
  unsigned int flags;
};

// CU_POINTER_ATTRIBUTE_DEVICE_POINTER: where kernels of the current context find the memory.
constexpr int kDevicePointerAttribute = 3;

// CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE: int each.
constexpr int kOrdinalAttribute = 9;
constexpr int kIpcAttribute = 10;

// CUipcMemHandle; given to the driver by value.
struct IpcHandle {
  char bytes[64];
};

// CUuuid
struct Uuid {
  char bytes[16];
};

// CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which every opener has to give.
constexpr unsigned int kIpcPeerAccess = 1;

// What every GPU takes as a pitch of a 2D copy (CU_DEVICE_ATTRIBUTE_MAX_PITCH).
constexpr int64_t kMaxPitch = INT32_MAX;

constexpr unsigned int kEventWithoutTiming = 2;

constexpr unsigned int kRegisterPortable = 1;
constexpr unsigned int kRegisterMapped = 2;

}  // namespace kvswap::cuda
