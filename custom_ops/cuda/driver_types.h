// The few types of the CUDA driver API that are used here, so that building needs no CUDA toolkit.
// tests/driver_types_test.cc compares them with cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvswap::cuda {

using Result = int;
using Stream = void*;
using Context = void*;
using DevicePointer = unsigned long long;

constexpr Result kSuccess = 0;
constexpr Result kNotSupported = 801;

enum MemoryType : int { kHost = 1, kDevice = 2 };

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

constexpr unsigned int kRegisterPortable = 1;
constexpr unsigned int kRegisterMapped = 2;

}  // namespace kvswap::cuda
