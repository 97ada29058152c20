// What tests tell the fake GPU, and what it tells them.
#include "locked.h"
#include "machine.h"

using fake::machine;
using fake::with;

extern "C" {

void fake_run_all(void) {
  with([] { machine().run_all(); });
}

// A kernel: `body(context, piece)` returns a CUDA error.
int fake_launch(uint64_t stream, int (*body)(void*, uint64_t), void* context, uint64_t pieces, int is_ordered) {
  return with([&]() -> int {
    if (const int result = machine().enter(); result != fake::kSuccess) return result;
    return machine().submit(stream, {pieces, is_ordered != 0, [=](size_t piece) { return body(context, piece); }});
  });
}

// Where a kernel finds the bytes of a device address; null where that is an illegal address.
void* fake_resolve(uint64_t address, uint64_t nbytes) {
  return with([&] { return static_cast<void*>(machine().memory.resolve(address, nbytes, fake::Eyes::kKernel)); });
}

const char* fake_faults(void) {
  static std::string all;
  return with([] {
    all.clear();
    for (const auto& fault : machine().faults) all += fault + "\n";
    return all.c_str();
  });
}
}
