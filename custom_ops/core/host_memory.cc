#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "error.h"

namespace kvswap {
namespace {

constexpr int kMaxNumaNode = 1023;
constexpr int kMpolPreferred = 1;  // a full node spills over instead of failing
constexpr unsigned long kBits = 8 * sizeof(unsigned long);

// Best effort: containers may refuse, and then the pages go where they are first touched.
void prefer_node(void* address, size_t nbytes, int node) {
#ifdef SYS_mbind
  unsigned long mask[(kMaxNumaNode + 1) / kBits] = {};
  mask[static_cast<unsigned long>(node) / kBits] = 1UL << (static_cast<unsigned long>(node) % kBits);
  syscall(SYS_mbind, address, nbytes, kMpolPreferred, mask, kMaxNumaNode + 1, 0);
#endif
}

void check_size(int64_t nbytes) {
  if (nbytes < 1) refuse("a host buffer needs at least one byte, got %lld", static_cast<long long>(nbytes));
}

}  // namespace
}  // namespace kvswap

int kvswap_host_alloc(int64_t nbytes, int numa_node, void** address) {
  return kvswap::guarded([&] {
    kvswap::check_size(nbytes);
    if (numa_node < -1 || numa_node > kvswap::kMaxNumaNode) kvswap::refuse("there is no NUMA node %d", numa_node);
    const auto size = static_cast<size_t>(nbytes);
    // Private, because a shared anonymous mapping is a shmem file, which transparent huge pages usually skip.
    void* mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) {
      throw kvswap::Error(KVSWAP_OUT_OF_MEMORY, kvswap::format("the system refused %lld bytes of host memory: %s",
                                                               static_cast<long long>(nbytes), std::strerror(errno)));
    }
    madvise(mapped, size, MADV_HUGEPAGE);  // a kernel without huge pages refuses; small pages work as well
    if (numa_node >= 0) kvswap::prefer_node(mapped, size, numa_node);
    *address = mapped;
  });
}

int kvswap_host_free(void* address, int64_t nbytes) {
  return kvswap::guarded([&] {
    kvswap::check_size(nbytes);
    if (address == nullptr || munmap(address, static_cast<size_t>(nbytes)) != 0) {
      kvswap::refuse("%p is not a host buffer of %lld bytes", address, static_cast<long long>(nbytes));
    }
  });
}
