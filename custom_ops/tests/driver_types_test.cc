// Our copies of the driver's types against the toolkit's: compiled where there is a cuda.h, never run.
#include "../cuda/driver_types.h"

#include <cuda.h>

#define SAME_PLACE(ours, field, theirs, member) \
  static_assert(offsetof(kvswap::cuda::ours, field) == offsetof(theirs, member), #member)

static_assert(sizeof(kvswap::cuda::Memcpy2D) == sizeof(CUDA_MEMCPY2D));
SAME_PLACE(Memcpy2D, source_type, CUDA_MEMCPY2D, srcMemoryType);
SAME_PLACE(Memcpy2D, source_host, CUDA_MEMCPY2D, srcHost);
SAME_PLACE(Memcpy2D, source_device, CUDA_MEMCPY2D, srcDevice);
SAME_PLACE(Memcpy2D, source_pitch, CUDA_MEMCPY2D, srcPitch);
SAME_PLACE(Memcpy2D, target_type, CUDA_MEMCPY2D, dstMemoryType);
SAME_PLACE(Memcpy2D, target_host, CUDA_MEMCPY2D, dstHost);
SAME_PLACE(Memcpy2D, target_device, CUDA_MEMCPY2D, dstDevice);
SAME_PLACE(Memcpy2D, target_pitch, CUDA_MEMCPY2D, dstPitch);
SAME_PLACE(Memcpy2D, width, CUDA_MEMCPY2D, WidthInBytes);
SAME_PLACE(Memcpy2D, height, CUDA_MEMCPY2D, Height);
static_assert(int{kvswap::cuda::kHost} == int{CU_MEMORYTYPE_HOST} &&
              int{kvswap::cuda::kDevice} == int{CU_MEMORYTYPE_DEVICE});
static_assert(sizeof(kvswap::cuda::DevicePointer) == sizeof(CUdeviceptr));
static_assert(kvswap::cuda::kNotSupported == CUDA_ERROR_NOT_SUPPORTED);
static_assert(kvswap::cuda::kDevicePointerAttribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER);
static_assert(kvswap::cuda::kRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE);
static_assert(kvswap::cuda::kRegisterMapped == CU_MEMHOSTREGISTER_DEVICEMAP);
static_assert(kvswap::cuda::kRegisterPortable == CU_MEMHOSTALLOC_PORTABLE);
static_assert(kvswap::cuda::kRegisterMapped == CU_MEMHOSTALLOC_DEVICEMAP);

#if CUDA_VERSION >= 12080
static_assert(sizeof(kvswap::cuda::MemcpyAttributes) == sizeof(CUmemcpyAttributes));
SAME_PLACE(MemcpyAttributes, source_access, CUmemcpyAttributes, srcAccessOrder);
SAME_PLACE(MemcpyAttributes, flags, CUmemcpyAttributes, flags);
static_assert(int{kvswap::cuda::kInStreamOrder} == int{CU_MEMCPY_SRC_ACCESS_ORDER_STREAM});
#endif
