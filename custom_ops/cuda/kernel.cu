// _core_cuda.so: the launch of the copy kernel, and nothing else. Loaded by _core.so when it is first needed.
#include <cuda_runtime.h>

#include "kernel.h"

namespace {

__global__ void __launch_bounds__(kvswap::cuda::kLanes* kvswap::cuda::kKernelWarps)
    copy_kernel(const __grid_constant__ kvswap::cuda::KernelArguments arguments) {
  constexpr int kLanes = kvswap::cuda::kLanes;
  const int warps = static_cast<int>(blockDim.x) / kLanes;
  const int warp = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x) / kLanes;
  kvswap::cuda::copy_rows(arguments,
                          {warp, static_cast<int>(gridDim.x) * warps, static_cast<int>(threadIdx.x) % kLanes});
}

}  // namespace

// _core.so asks first: the two may come from different builds.
extern "C" __attribute__((visibility("default"))) int kvswap_kernel_abi() { return kvswap::cuda::kKernelAbi; }

extern "C" __attribute__((visibility("default"))) int kvswap_kernel_launch(
    const kvswap::cuda::KernelArguments* arguments, int groups, int threads, void* stream) {
  copy_kernel<<<groups, threads, 0, static_cast<cudaStream_t>(stream)>>>(*arguments);
  return static_cast<int>(cudaGetLastError());
}
