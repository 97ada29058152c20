#include "error.h"

#include <cstring>

#ifndef KVSWAP_SOURCES
#define KVSWAP_SOURCES ""
#endif

namespace kvswap {
namespace {
thread_local char last_error[256];
}

void remember_error(const char* message) noexcept { std::strncpy(last_error, message, sizeof(last_error) - 1); }

}  // namespace kvswap

int kvswap_abi(void) { return KVSWAP_ABI; }
const char* kvswap_sources(void) { return KVSWAP_SOURCES; }
const char* kvswap_last_error(void) { return kvswap::last_error; }
