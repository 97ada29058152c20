// custom_ops/paddle_ops.cu for tensors on a GPU, over the fake runtime beside this: tensors of a CPU pass for those of
// a GPU, and the kernel's body runs on the CPU.
#include "paddle/phi/common/data_type.h"  // numbers, without those of CUDA
#define PADDLE_WITH_CUDA
#include "paddle/phi/api/ext/op_meta_info.h"

gpuStream_t paddle::Tensor::stream() const { return &fake_cuda().stream; }  // a Paddle without GPUs has none

#define is_gpu initialized
#define is_cpu is_gpu_pinned
#include "../../../../custom_ops/paddle_ops.cu"

KVCACHE_EXPORT void fake_page_locked(char* host, int64_t size, char* mapped) {
  fake_cuda().host = host;
  fake_cuda().host_end = host + size;
  fake_cuda().mapped = mapped;
}
KVCACHE_EXPORT int64_t fake_enqueued() { return static_cast<int64_t>(fake_cuda().stream.work.size()); }
KVCACHE_EXPORT void fake_run_all() { fake_run(&fake_cuda().stream); }
KVCACHE_EXPORT const char* fake_log() {
  static std::string told;
  told.swap(fake_cuda().log);
  fake_cuda().log.clear();
  return told.c_str();
}
