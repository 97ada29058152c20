// Copies between two sides of host memory, for CPU servers. Called by ctypes without the interpreter lock, from the
// thread that is the stream; what it is given was checked before.
#include <stdint.h>
#include <string.h>

typedef struct {
  uint64_t target, source;
  int64_t target_pitch, source_pitch, bytes;
} Row;
typedef struct {
  int64_t source, target, blocks;
} Span;

void copy_rows(const Row* rows, int64_t num_rows, const Span* spans, int64_t num_spans) {
  for (const Row* row = rows; row < rows + num_rows; ++row) {
    const int dense = row->target_pitch == row->bytes && row->source_pitch == row->bytes;
    for (const Span* span = spans; span < spans + num_spans; ++span) {
      char* to = (char*)row->target + span->target * row->target_pitch;
      const char* of = (const char*)row->source + span->source * row->source_pitch;
      const int64_t pieces = dense ? 1 : span->blocks, bytes = dense ? span->blocks * row->bytes : row->bytes;
      for (int64_t i = 0; i < pieces; ++i) memcpy(to + i * row->target_pitch, of + i * row->source_pitch, bytes);
    }
  }
}
