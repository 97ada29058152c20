// Copies with non-temporal stores, as wide as this CPU has them; memcpy where it has none.
#pragma once

#include <cstddef>

namespace kvswap {

using StreamCopy = void (*)(void* to, const void* of, size_t nbytes);

StreamCopy stream_copy_of_this_cpu();
// Non-temporal stores are weakly ordered: call once after the last of them, before telling anybody.
void finish_stream_copies();

}  // namespace kvswap
