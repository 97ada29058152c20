// The least a test program needs.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "../kvswap.h"

#define EXPECT(condition)                                                                           \
  do {                                                                                              \
    if (!(condition)) {                                                                             \
      std::fprintf(stderr, "%s:%d: expected %s (last error: %s)\n", __FILE__, __LINE__, #condition, \
                   kvswap_last_error());                                                            \
      std::exit(1);                                                                                 \
    }                                                                                               \
  } while (false)

// `code` is expected, with `part` in the message.
#define EXPECT_REFUSED(call, code, part)                                      \
  do {                                                                        \
    EXPECT((call) == (code));                                                 \
    EXPECT(std::string(kvswap_last_error()).find(part) != std::string::npos); \
  } while (false)

using Random = std::mt19937;

inline int64_t pick(Random& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}
