// Page-locked host memory. Portable: every context of the process may copy from it; mapped: kernels may read it.
#include "driver.h"

namespace {

constexpr unsigned int kFlags = kvswap::cuda::kRegisterPortable | kvswap::cuda::kRegisterMapped;

void check_buffer(const void* address, int64_t nbytes) {
  if (address == nullptr || nbytes < 1) {
    kvswap::refuse("%lld bytes at %p are no host buffer", static_cast<long long>(nbytes), address);
  }
}

}  // namespace

int kvswap_cuda_host_alloc(int64_t nbytes, void** address) {
  return kvswap::guarded([&] {
    check_buffer(address, nbytes);
    const auto& cuda = kvswap::cuda::driver_with_context();
    kvswap::cuda::check(cuda, cuda.host_alloc(address, static_cast<size_t>(nbytes), kFlags), "cuMemHostAlloc");
  });
}

int kvswap_cuda_host_free(void* address) {
  return kvswap::guarded([&] {
    check_buffer(address, 1);
    const auto& cuda = kvswap::cuda::driver_with_context();
    kvswap::cuda::check(cuda, cuda.host_free(address), "cuMemFreeHost");
  });
}

int kvswap_cuda_host_register(void* address, int64_t nbytes) {
  return kvswap::guarded([&] {
    check_buffer(address, nbytes);
    const auto& cuda = kvswap::cuda::driver_with_context();
    kvswap::cuda::check(cuda, cuda.host_register(address, static_cast<size_t>(nbytes), kFlags), "cuMemHostRegister");
  });
}

int kvswap_cuda_host_unregister(void* address) {
  return kvswap::guarded([&] {
    check_buffer(address, 1);
    const auto& cuda = kvswap::cuda::driver_with_context();
    kvswap::cuda::check(cuda, cuda.host_unregister(address), "cuMemHostUnregister");
  });
}
