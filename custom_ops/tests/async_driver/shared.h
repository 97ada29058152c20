// An allocation whose bytes another process may map, as CUDA's handles of memory allow.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace fake {

// What a handle says. It ends with the process that made it.
struct SharedName {
  uint64_t magic, nbytes, serial;
  pid_t process;
  int file;
  int device;  // that has the memory
};

class Shared {
 public:
  static std::shared_ptr<Shared> make(size_t nbytes);
  // Null where the owner has freed it or has ended.
  static std::shared_ptr<Shared> open(const SharedName& name);
  ~Shared();
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  uint8_t* bytes() const;
  size_t nbytes() const { return static_cast<size_t>(name_.nbytes); }
  const SharedName& name() const { return name_; }
  bool has_ended() const;
  bool is_mapped_elsewhere() const;
  // The owner frees it.
  void end();

 private:
  Shared(int file, const SharedName& name);
  struct Header {
    std::atomic<uint64_t> serial;
    std::atomic<bool> has_ended;
  };
  Header* header_ = nullptr;
  int file_;
  SharedName name_;
};

}  // namespace fake
