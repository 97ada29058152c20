// Failures inside the library are exceptions; they end at the C ABI, where `guarded` turns them into codes.
#pragma once

#include <cstdio>
#include <exception>
#include <new>
#include <string>
#include <utility>

#include "../kvswap.h"

namespace kvswap {

class Error : public std::exception {
 public:
  Error(int code, std::string message) : code_(code), message_(std::move(message)) {}
  int code() const { return code_; }
  const char* what() const noexcept override { return message_.c_str(); }

 private:
  int code_;
  std::string message_;
};

template <typename... Args>
std::string format(const char* pattern, Args... args) {
  char line[256];
  std::snprintf(line, sizeof(line), pattern, args...);
  return line;
}

template <typename... Args>
[[noreturn]] void refuse(const char* pattern, Args... args) {
  throw Error(KVSWAP_INVALID, format(pattern, args...));
}

// Kept per thread for kvswap_last_error; longer messages are cut.
void remember_error(const char* message) noexcept;

template <typename Body>
int guarded(Body body) noexcept {
  try {
    body();
    return KVSWAP_OK;
  } catch (const Error& error) {
    remember_error(error.what());
    return error.code();
  } catch (const std::bad_alloc&) {
    remember_error("out of memory");
    return KVSWAP_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    remember_error(error.what());
    return KVSWAP_INTERNAL;
  }
}

}  // namespace kvswap
