// _core_cuda.so: the launch of the copy kernel, and nothing else. Loaded by _core.so when it is first needed.
#include <cuda_runtime.h>

#include "kernel.h"

namespace {

__global__ void __launch_bounds__(kvswap::cuda::kKernelThreads)
    copy_kernel(const __grid_constant__ kvswap::cuda::KernelArguments arguments) {
  kvswap::cuda::copy_rows(arguments, {static_cast<int32_t>(blockIdx.x), static_cast<int32_t>(gridDim.x),
                                      static_cast<int32_t>(threadIdx.x), static_cast<int32_t>(blockDim.x)});
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int kvswap_kernel_launch(
    const kvswap::cuda::KernelArguments* arguments, int groups, int threads, void* stream) {
  copy_kernel<<<groups, threads, 0, static_cast<cudaStream_t>(stream)>>>(*arguments);
  return static_cast<int>(cudaGetLastError());
}
