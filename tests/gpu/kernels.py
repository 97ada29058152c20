"""The suite's own kernels: CUDA source, and beside each its NumPy twin for the fake GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

SOURCE = r"""
extern "C" __global__ void spin(long long cycles) {
  const long long start = clock64();
  while (clock64() - start < cycles) {}
}
extern "C" __global__ void fill(unsigned char* bytes, long long count, int value) {
  const long long step = gridDim.x * (long long)blockDim.x;
  for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < count; i += step)
    bytes[i] = (unsigned char)value;
}
extern "C" __global__ void compute(float* out, int rounds) {
  float a = threadIdx.x, b = blockIdx.x;
  for (int i = 0; i < rounds; ++i) { a = fmaf(a, 0.5f, b); b = fmaf(b, 0.5f, a); }
  out[blockIdx.x * blockDim.x + threadIdx.x] = a + b;
}
// One block of threads. `where` are rows of two words; a row holds its tag and the tag's complement.
extern "C" __global__ void attend(long long* cache, const long long* work, int writes, int reads, long long* fault) {
  const long long* where = work;
  const long long* tags = work + writes + reads;
  for (int i = threadIdx.x; i < writes; i += blockDim.x) {
    cache[2 * where[i]] = tags[i];
    cache[2 * where[i] + 1] = ~tags[i];
  }
  __syncthreads();
  for (int i = writes + threadIdx.x; i < writes + reads; i += blockDim.x) {
    const long long found = cache[2 * where[i]], other = cache[2 * where[i] + 1];
    if ((found != tags[i] || other != ~tags[i]) &&
        atomicAdd((unsigned long long*)fault, 1ULL) == 0) {
      fault[1] = where[i];
      fault[2] = tags[i];
      fault[3] = found;
    }
  }
}
"""


def attend(cache: np.ndarray, work: np.ndarray, writes: int, reads: int, fault: np.ndarray) -> None:
    rows = cache.reshape(-1, 2)
    where, tags = work[: writes + reads], work[writes + reads :]
    rows[where[:writes], 0] = tags[:writes]
    rows[where[:writes], 1] = ~tags[:writes]
    found = rows[where[writes:]]
    wrong = np.flatnonzero((found[:, 0] != tags[writes:]) | (found[:, 1] != ~tags[writes:]))
    if wrong.size:
        if fault[0] == 0:
            first = writes + wrong[0]
            fault[1:] = where[first], tags[first], found[wrong[0], 0]
        fault[0] += wrong.size


def fill(array: np.ndarray, count: int, value: int) -> None:
    array.reshape(-1).view(np.uint8)[:count] = value


TWINS: dict[str, Callable[..., None]] = {
    "spin": lambda cycles: None,
    "compute": lambda out, rounds: None,
    "fill": fill,
    "attend": attend,
}


@cache
def kernel(name: str) -> Any:
    """Compiled, so that the first launch takes no time."""
    import cupy

    made = cupy.RawKernel(SOURCE, name)
    made.compile()
    return made
