#include "stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace kvswap {
namespace {

void plain_copy(void* to, const void* of, size_t nbytes) { std::memcpy(to, of, nbytes); }

#if defined(__x86_64__)

constexpr size_t kLine = 64;
constexpr size_t kStep = 4 * kLine;  // no prefetches: measured, the hardware's own are as good or better

// Copies up to the first cache line border of the target; returns how many bytes that were.
size_t copy_head(char* to, const char* of, size_t nbytes) {
  const size_t head = std::min((kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine, nbytes);
  std::memcpy(to, of, head);
  return head;
}

__attribute__((target("avx2"))) void avx2_copy(void* target, const void* source, size_t nbytes) {
  auto* to = static_cast<char*>(target);
  auto* of = static_cast<const char*>(source);
  const size_t head = copy_head(to, of, nbytes);
  to += head, of += head, nbytes -= head;
  for (; nbytes >= kStep; to += kStep, of += kStep, nbytes -= kStep) {
    __m256i words[8];
    for (int i = 0; i < 8; ++i) words[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(of) + i);
    for (int i = 0; i < 8; ++i) _mm256_stream_si256(reinterpret_cast<__m256i*>(to) + i, words[i]);
  }
  std::memcpy(to, of, nbytes);
}

__attribute__((target("avx512f"))) void avx512_copy(void* target, const void* source, size_t nbytes) {
  auto* to = static_cast<char*>(target);
  auto* of = static_cast<const char*>(source);
  const size_t head = copy_head(to, of, nbytes);
  to += head, of += head, nbytes -= head;
  for (; nbytes >= kStep; to += kStep, of += kStep, nbytes -= kStep) {
    __m512i words[4];
    for (int i = 0; i < 4; ++i) words[i] = _mm512_loadu_si512(of + i * 64);
    for (int i = 0; i < 4; ++i) _mm512_stream_si512(reinterpret_cast<__m512i*>(to) + i, words[i]);
  }
  std::memcpy(to, of, nbytes);
}

#endif

StreamCopy choose() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return avx512_copy;
  if (__builtin_cpu_supports("avx2")) return avx2_copy;
#endif
  return plain_copy;
}

}  // namespace

StreamCopy stream_copy_of_this_cpu() {
  static const StreamCopy chosen = choose();
  return chosen;
}

void finish_stream_copies() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

}  // namespace kvswap
