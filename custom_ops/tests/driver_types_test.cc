// Our copies of the driver's types against the toolkit's: compiled where there is a cuda.h, never run.
#include <cuda.h>
#include <cudaTypedefs.h>

#include <type_traits>

#include "../cuda/driver.h"

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

static_assert(kvswap::cuda::kOrdinalAttribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
static_assert(kvswap::cuda::kIpcAttribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
static_assert(kvswap::cuda::kIpcPeerAccess == CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
static_assert(sizeof(kvswap::cuda::IpcHandle) == sizeof(CUipcMemHandle));
static_assert(sizeof(kvswap::cuda::Uuid) == sizeof(CUuuid));

#if CUDA_VERSION >= 12080
static_assert(sizeof(kvswap::cuda::MemcpyAttributes) == sizeof(CUmemcpyAttributes));
SAME_PLACE(MemcpyAttributes, source_access, CUmemcpyAttributes, srcAccessOrder);
SAME_PLACE(MemcpyAttributes, flags, CUmemcpyAttributes, flags);
static_assert(int{kvswap::cuda::kInStreamOrder} == int{CU_MEMCPY_SRC_ACCESS_ORDER_STREAM});
#endif

// The functions: as many arguments as the toolkit's, of the same size, pointers where it has pointers.
template <typename Ours, typename Theirs>
struct SameCall : std::false_type {};
template <typename... A, typename... B>
struct SameCall<kvswap::cuda::Result (*)(A...), CUresult(CUDAAPI*)(B...)> {
  static constexpr bool value = [] {
    if constexpr (sizeof...(A) == sizeof...(B)) {
      return ((sizeof(A) == sizeof(B) && std::is_pointer_v<A> == std::is_pointer_v<B>) && ...);
    }
    return false;
  }();
};
static_assert(sizeof(kvswap::cuda::Result) == sizeof(CUresult));

#define SAME_CALL(member, theirs) \
  static_assert(SameCall<decltype(kvswap::cuda::Driver::member), theirs>::value, #member " is not " #theirs)

SAME_CALL(get_error_name, PFN_cuGetErrorName_v6000);
SAME_CALL(get_context, PFN_cuCtxGetCurrent_v4000);
SAME_CALL(pointer_attribute, PFN_cuPointerGetAttribute_v4000);
SAME_CALL(copy, PFN_cuMemcpyAsync_v4000);
SAME_CALL(copy_2d, PFN_cuMemcpy2DAsync_v3020);
SAME_CALL(synchronize, PFN_cuStreamSynchronize_v2000);
SAME_CALL(host_alloc, PFN_cuMemHostAlloc_v2020);
SAME_CALL(host_free, PFN_cuMemFreeHost_v2000);
SAME_CALL(host_register, PFN_cuMemHostRegister_v6050);
SAME_CALL(host_unregister, PFN_cuMemHostUnregister_v4000);
SAME_CALL(event_create, PFN_cuEventCreate_v2000);
SAME_CALL(event_record, PFN_cuEventRecord_v2000);
SAME_CALL(wait_event, PFN_cuStreamWaitEvent_v3020);
SAME_CALL(address_range, PFN_cuMemGetAddressRange_v3020);
SAME_CALL(ipc_export, PFN_cuIpcGetMemHandle_v4010);
SAME_CALL(ipc_open, PFN_cuIpcOpenMemHandle_v11000);
SAME_CALL(ipc_close, PFN_cuIpcCloseMemHandle_v4010);
SAME_CALL(device_count, PFN_cuDeviceGetCount_v2000);
SAME_CALL(device, PFN_cuDeviceGet_v2000);
SAME_CALL(device_uuid, PFN_cuDeviceGetUuid_v11040);
SAME_CALL(device_uuid, PFN_cuDeviceGetUuid_v9020);
SAME_CALL(can_access_peer, PFN_cuDeviceCanAccessPeer_v4000);
static_assert(!SameCall<decltype(kvswap::cuda::Driver::copy), PFN_cuMemcpy2DAsync_v3020>::value, "it can fail");
#if CUDA_VERSION >= 12080
SAME_CALL(copy_batch, PFN_cuMemcpyBatchAsync_v12080);
#endif
#if CUDA_VERSION >= 13000
static_assert(!SameCall<decltype(kvswap::cuda::Driver::copy_batch), PFN_cuMemcpyBatchAsync_v13000>::value,
              "13.0 has another function under this name");
#endif
static_assert(int{kvswap::cuda::kUnified} == int{CU_MEMORYTYPE_UNIFIED});
static_assert(kvswap::cuda::kEventWithoutTiming == CU_EVENT_DISABLE_TIMING);
static_assert(sizeof(kvswap::cuda::Location) <= sizeof(CUmemLocation));
