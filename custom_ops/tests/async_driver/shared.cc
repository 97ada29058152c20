#include "shared.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>

namespace fake {
namespace {

constexpr uint64_t kMagic = 0x66616b6520697063;
constexpr size_t kHeader = 4096;

}  // namespace

Shared::Shared(int file, const SharedName& name) : file_(file), name_(name) {
  void* memory = mmap(nullptr, kHeader + nbytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  if (memory == MAP_FAILED) abort();
  header_ = static_cast<Header*>(memory);
}

std::shared_ptr<Shared> Shared::make(size_t nbytes) {
  static uint64_t serial = 0;
  const int file = memfd_create("fake-gpu", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(kHeader + nbytes)) != 0) abort();
  auto made = std::shared_ptr<Shared>(new Shared(file, {kMagic, nbytes, ++serial, getpid(), file, 0}));
  made->header_->serial = serial;
  return made;
}

// The lock says that it is mapped; it ends with this process, however that ends.
std::shared_ptr<Shared> Shared::open(const SharedName& name) {
  if (name.magic != kMagic) return nullptr;
  const std::string path = "/proc/" + std::to_string(name.process) + "/fd/" + std::to_string(name.file);
  const int file = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (file < 0) return nullptr;
  if (lseek(file, 0, SEEK_END) != static_cast<off_t>(kHeader + name.nbytes) || flock(file, LOCK_SH | LOCK_NB) != 0) {
    close(file);
    return nullptr;
  }
  auto made = std::shared_ptr<Shared>(new Shared(file, name));
  return made->header_->serial == name.serial && !made->has_ended() ? made : nullptr;
}

Shared::~Shared() {
  munmap(header_, kHeader + nbytes());
  close(file_);
}

uint8_t* Shared::bytes() const { return reinterpret_cast<uint8_t*>(header_) + kHeader; }

bool Shared::has_ended() const { return header_->has_ended; }

bool Shared::is_mapped_elsewhere() const {
  if (flock(file_, LOCK_EX | LOCK_NB) != 0) return true;
  flock(file_, LOCK_UN);
  return false;
}

void Shared::end() { header_->has_ended = true; }

}  // namespace fake
