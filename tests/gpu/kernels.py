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
// The decoder's. A thread sums alone and in order: what a row gives does not depend on the rows beside it.
// `mode`: 0 writes, 1 writes through tanh, 2 adds.
extern "C" __global__ void project(float* out, const float* in, const float* weight, int rows, int from, int to,
                                   int mode) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / to, column = i % to;
  if (row >= rows) return;
  float sum = 0;
  for (int k = 0; k < from; ++k) sum += in[row * from + k] * weight[k * to + column];
  out[i] = mode == 1 ? tanhf(sum) : mode == 2 ? out[i] + sum : sum;
}
// `qkv` [rows][3 * width], `tables` [rows][blocks], a cache tensor [slots][block_size][width].
extern "C" __global__ void store_kv(float* keys, float* values, const float* qkv, const long long* tables,
                                    const long long* positions, int rows, int blocks, int block_size, int width) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / width, column = i % width;
  if (row >= rows) return;
  const long long at = positions[row], slot = tables[row * blocks + at / block_size];
  const long long place = (slot * block_size + at % block_size) * width + column;
  keys[place] = qkv[row * 3 * width + width + column];
  values[place] = qkv[row * 3 * width + 2 * width + column];
}
// A thread per row and head of `dim` <= 32 columns, over the positions up to the row's own.
extern "C" __global__ void attend_paged(float* out, const float* keys, const float* values, const float* qkv,
                                        const long long* tables, const long long* positions, int rows, int blocks,
                                        int block_size, int width, int dim) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, row = i / (width / dim), first = i % (width / dim) * dim;
  if (row >= rows) return;
  const float* query = qkv + row * 3 * width + first;
  float most = -1e30f, total = 0, sum[32] = {};
  for (int pass = 0; pass < 2; ++pass) {
    for (long long at = 0; at <= positions[row]; ++at) {
      const long long place = (tables[row * blocks + at / block_size] * block_size + at % block_size) * width + first;
      float score = 0;
      for (int k = 0; k < dim; ++k) score += query[k] * keys[place + k];
      if (pass == 0) {
        most = fmaxf(most, score);
        continue;
      }
      const float share = expf(score - most);
      total += share;
      for (int k = 0; k < dim; ++k) sum[k] += share * values[place + k];
    }
  }
  for (int k = 0; k < dim; ++k) out[row * width + first + k] = sum[k] / total;
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


def project(out: np.ndarray, of: np.ndarray, weight: np.ndarray, rows: int, width: int, to: int, mode: int) -> None:
    total = np.zeros((rows, to), np.float32)
    for k in range(width):  # in order, as a thread does: a matrix product's result may depend on the rows beside
        total += of[:rows, k : k + 1] * weight[k]
    out[:rows] = np.tanh(total) if mode == 1 else out[:rows] + total if mode == 2 else total


def store_kv(
    keys: np.ndarray, values: np.ndarray, qkv: np.ndarray, tables: np.ndarray, positions: np.ndarray,
    rows: int, blocks: int, block_size: int, width: int,
) -> None:  # fmt: skip
    slots = tables[np.arange(rows), positions // block_size]
    for tensor, part in ((keys, 1), (values, 2)):
        tokens = tensor.view(np.float32).reshape(-1, block_size, width)
        tokens[slots, positions % block_size] = qkv[:, part * width : (part + 1) * width]


def attend_paged(
    out: np.ndarray, keys: np.ndarray, values: np.ndarray, qkv: np.ndarray, tables: np.ndarray, positions: np.ndarray,
    rows: int, blocks: int, block_size: int, width: int, dim: int,
) -> None:  # fmt: skip
    for row in range(rows):
        at = np.arange(positions[row] + 1)
        slots, tokens = tables[row, at // block_size], at % block_size
        k, v = (
            tensor.view(np.float32).reshape(-1, block_size, width)[slots, tokens].reshape(len(at), -1, dim)
            for tensor in (keys, values)
        )
        scores = (k * qkv[row, :width].reshape(-1, dim)).sum(axis=2)
        shares = np.exp(scores - scores.max(axis=0))
        out[row] = ((shares[:, :, None] * v).sum(axis=0) / shares.sum(axis=0)[:, None]).reshape(-1)


TWINS: dict[str, Callable[..., None]] = {
    "spin": lambda cycles: None,
    "compute": lambda out, rounds: None,
    "fill": fill,
    "attend": attend,
    "project": project,
    "store_kv": store_kv,
    "attend_paged": attend_paged,
}


@cache
def kernel(name: str) -> Any:
    """Compiled, so that the first launch takes no time."""
    import cupy

    made = cupy.RawKernel(SOURCE, name)
    made.compile()
    return made
