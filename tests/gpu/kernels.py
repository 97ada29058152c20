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
"""


def fill(array: np.ndarray, count: int, value: int) -> None:
    array.reshape(-1).view(np.uint8)[:count] = value


TWINS: dict[str, Callable[..., None]] = {"spin": lambda cycles: None, "compute": lambda out, rounds: None, "fill": fill}


@cache
def kernel(name: str) -> Any:
    """Compiled, so that the first launch takes no time."""
    import cupy

    made = cupy.RawKernel(SOURCE, name)
    made.compile()
    return made
