// The one lock of the fake GPU. Recursive: a kernel's body may free memory.
#pragma once

#include <mutex>

namespace fake {

std::recursive_mutex& lock();

inline std::unique_lock<std::recursive_mutex> hold() { return std::unique_lock<std::recursive_mutex>(lock()); }

template <typename Call>
auto with(Call call) {
  const auto locked = hold();
  return call();
}

}  // namespace fake
