// Which addresses mean what to the fake GPU. A device address is no address of this process: who reads it, crashes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>

#include "shared.h"

namespace fake {

// Through whose eyes an address is looked up: a copy knows every host address, a kernel only page-locked memory, by its
// device address.
enum class Eyes { kCopy, kKernel };

struct Range {
  uint64_t nbytes;
  uint8_t* storage;
  std::shared_ptr<void> owned;     // of device memory
  bool is_exportable = false;      // other processes may map it
  std::shared_ptr<Shared> shared;  // they can, or it is another process's
};

struct Extent {
  uint64_t base, nbytes;
};

class Memory {
 public:
  Memory();
  // Addresses are never used again, so a late copy into freed memory is seen.
  uint64_t allocate(size_t nbytes, bool is_exportable);
  bool free(uint64_t address);
  // The whole allocation around an address; 0 bytes for none.
  Extent extent(uint64_t address) const;
  bool is_exportable(uint64_t address) const;
  bool is_mapped_elsewhere(uint64_t address) const;
  // Both are null or 0 where the driver refuses.
  std::shared_ptr<Shared> share(uint64_t address);
  uint64_t map(std::shared_ptr<Shared> shared);
  bool unmap(uint64_t address);
  // The device address of page-locked host memory is not its host address.
  bool register_host(uint64_t address, size_t nbytes);
  bool unregister_host(uint64_t address);
  bool is_registered(uint64_t address, size_t nbytes) const;
  bool is_device(uint64_t address) const { return address >= arena_ && address < arena_ + kArena; }
  // 0 where kernels cannot reach it.
  uint64_t device_address(uint64_t address) const;
  // Where the bytes really are; null for memory that is not there, or that these eyes cannot see.
  uint8_t* resolve(uint64_t address, size_t nbytes, Eyes eyes) const;

 private:
  static constexpr uint64_t kArena = uint64_t{1} << 40;
  struct Registered {
    uint64_t nbytes, alias;
  };
  uint64_t reserve(size_t nbytes);
  const std::pair<const uint64_t, Registered>* registration(uint64_t address, size_t nbytes) const;

  uint64_t arena_ = 0, next_ = 0;
  std::map<uint64_t, Range> on_device_;  // by device address, aliases included
  std::map<uint64_t, Registered> registered_;
};

}  // namespace fake
