#include "../core/error.h"
static int no() { return kvswap::guarded([]{ throw kvswap::Error(KVSWAP_UNAVAILABLE, "no CUDA"); }); }
int kvswap_cuda_available(void) { return no(); }
int kvswap_cuda_has_path(int) { return 0; }
int kvswap_cuda_copy(const kvswap_rows*, const kvswap_rows*, int64_t, const kvswap_plan*, int, int, uint64_t) { return no(); }
int kvswap_cuda_host_alloc(int64_t, void**) { return no(); }
int kvswap_cuda_host_free(void*) { return no(); }
int kvswap_cuda_host_register(void*, int64_t) { return no(); }
int kvswap_cuda_host_unregister(void*) { return no(); }
