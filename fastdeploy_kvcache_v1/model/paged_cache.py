"""Read and write rows of one cache tensor, whatever its dtype."""

from __future__ import annotations

from typing import Any

import paddle

Tensor = Any

_FLOAT16_MAX = 65_504.0


class PagedCache:
    """View of a cache tensor `[num_blocks, num_kv_heads, block_size, head_dim]` as one row per token and head.

    Shares the tensor's memory. Two-byte dtypes are moved as pairs in an int32: paddle's CPU kernels for gathering and
    scattering rows lack some of them.
    """

    def __init__(self, cache: Tensor) -> None:
        self._shape = cache.shape
        self._dtype = str(cache.dtype).removeprefix("paddle.")
        rows = cache.view([-1, self._shape[3]])
        self._rows = rows if self._dtype == "float32" else rows.view("int32")

    def write(self, index: Tensor, values: Tensor) -> None:
        """Store float32 `values` `[n, head_dim]`, rounded to the cache's dtype, in rows `index` and nowhere else."""
        if self._dtype == "float16":
            # An infinity would turn the masked products of other tokens, 0 * value, into NaN.
            values = paddle.clip(values, -_FLOAT16_MAX, _FLOAT16_MAX)
        if self._dtype != "float32":
            values = values.astype(self._dtype).view("int32")
        paddle.scatter_(self._rows, index, values)

    def read(self, index: Tensor) -> Tensor:
        """Rows `index` as float32 `[num_kv_heads, n, head_dim]`, where `index` lists n rows for each head."""
        rows = paddle.gather(self._rows, index)
        if self._dtype != "float32":
            rows = rows.view(self._dtype).astype("float32")
        return rows.reshape([self._shape[1], -1, self._shape[3]])
