#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <vector>

namespace fake {
namespace {

constexpr uint64_t kBorder = 4096;

template <typename Map>
auto around(const Map& ranges, uint64_t address, size_t nbytes) -> decltype(&*ranges.begin()) {
  auto found = ranges.upper_bound(address);
  if (found == ranges.begin()) return nullptr;
  --found;
  return address + nbytes <= found->first + found->second.nbytes ? &*found : nullptr;
}

}  // namespace

Memory::Memory() {
  void* arena = mmap(nullptr, kArena, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) abort();
  arena_ = next_ = reinterpret_cast<uint64_t>(arena);
}

uint64_t Memory::reserve(size_t nbytes) {
  const uint64_t address = next_;
  next_ += (nbytes + 2 * kBorder - 1) / kBorder * kBorder;  // a page between two allocations
  if (next_ > arena_ + kArena) abort();
  return address;
}

uint64_t Memory::allocate(size_t nbytes, bool is_exportable) {
  auto bytes = std::make_shared<std::vector<uint8_t>>(nbytes, uint8_t{0xA5});
  const uint64_t address = reserve(nbytes);
  on_device_[address] = {nbytes, bytes->data(), bytes, is_exportable, nullptr};
  return address;
}

Extent Memory::extent(uint64_t address) const {
  const auto* found = around(on_device_, address, 1);
  return found == nullptr || found->second.owned == nullptr ? Extent{0, 0} : Extent{found->first, found->second.nbytes};
}

bool Memory::is_exportable(uint64_t address) const {
  const auto* found = around(on_device_, address, 1);
  return found != nullptr && found->second.is_exportable;
}

bool Memory::is_mapped_elsewhere(uint64_t address) const {
  const auto* found = around(on_device_, address, 1);
  return found != nullptr && found->second.is_exportable && found->second.shared != nullptr &&
         found->second.shared->is_mapped_elsewhere();
}

// From now on its bytes lie where other processes find them. Nobody has kept an address of the old ones.
std::shared_ptr<Shared> Memory::share(uint64_t address) {
  if (!is_exportable(address)) return nullptr;
  Range& range = on_device_.at(extent(address).base);
  if (range.shared == nullptr) {
    range.shared = Shared::make(range.nbytes);
    std::memcpy(range.shared->bytes(), range.storage, range.nbytes);
    range.storage = range.shared->bytes();
    range.owned = range.shared;
  }
  return range.shared;
}

uint64_t Memory::map(std::shared_ptr<Shared> shared) {
  const uint64_t address = reserve(shared->nbytes());
  on_device_[address] = {shared->nbytes(), shared->bytes(), shared, false, shared};
  return address;
}

bool Memory::unmap(uint64_t address) {
  const auto found = on_device_.find(address);
  if (found == on_device_.end() || found->second.shared == nullptr || found->second.is_exportable) return false;
  on_device_.erase(found);
  return true;
}

bool Memory::free(uint64_t address) {
  const auto found = on_device_.find(address);
  if (found == on_device_.end() || found->second.owned == nullptr) return false;
  const auto& shared = found->second.shared;
  if (shared != nullptr) {
    if (!found->second.is_exportable) return false;  // another process's
    shared->end();
  }
  on_device_.erase(found);
  return true;
}

bool Memory::register_host(uint64_t address, size_t nbytes) {
  if (nbytes == 0 || is_device(address)) return false;
  const auto next = registered_.lower_bound(address);
  if (next != registered_.end() && next->first < address + nbytes) return false;
  if (registration(address, 1) != nullptr) return false;
  const uint64_t alias = reserve(nbytes);
  registered_[address] = {nbytes, alias};
  on_device_[alias] = {nbytes, reinterpret_cast<uint8_t*>(address), nullptr, false, nullptr};
  return true;
}

bool Memory::unregister_host(uint64_t address) {
  const auto found = registered_.find(address);
  if (found == registered_.end()) return false;
  on_device_.erase(found->second.alias);
  registered_.erase(found);
  return true;
}

const std::pair<const uint64_t, Memory::Registered>* Memory::registration(uint64_t address, size_t nbytes) const {
  return around(registered_, address, nbytes);
}

bool Memory::is_registered(uint64_t address, size_t nbytes) const { return registration(address, nbytes) != nullptr; }

uint64_t Memory::device_address(uint64_t address) const {
  if (is_device(address)) return around(on_device_, address, 1) == nullptr ? 0 : address;
  const auto* found = registration(address, 1);
  return found == nullptr ? 0 : found->second.alias + (address - found->first);
}

uint8_t* Memory::resolve(uint64_t address, size_t nbytes, Eyes eyes) const {
  if (is_device(address)) {
    const auto* found = around(on_device_, address, nbytes);
    if (found == nullptr || (found->second.shared != nullptr && found->second.shared->has_ended())) return nullptr;
    return found->second.storage + (address - found->first);
  }
  return eyes == Eyes::kKernel ? nullptr : reinterpret_cast<uint8_t*>(address);
}

}  // namespace fake
