"""CacheController: the front door of the worker half."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..attention.base import AttentionCacheBackend, CacheLayout
from ..contract.messages import RankCopies
from ..errors import CacheStateError, ConfigError, InvariantError
from . import ops
from .host_pool import HostPool
from .ops import LayerRows
from .runtime import Runtime
from .transfer_manager import CacheTransferManager

__all__ = ["CacheController"]


class _Caches(NamedTuple):
    tensors: dict[str, Any]
    """By name, in flat order."""
    host: HostPool
    transfers: CacheTransferManager


class CacheController:
    """Owner of a rank's cache tensors, its host pool and the copies between them. Not thread-safe.

    Per step, on `transfers`: `submit`, `before_compute`, the forward pass (which waits for each layer with the
    counter), `after_compute`, `take_report`. Only a CPU's forward pass blocks, at most `layer_timeout_s` per wait.
    """

    def __init__(
        self,
        backend: AttentionCacheBackend,
        *,
        runtime: Runtime,
        layer_timeout_s: float = 30.0,
        rank: int = 0,
        device: int = 0,
        host_trailer_bytes: int = 0,
        copies: RankCopies | None = None,
    ) -> None:
        """`host_trailer_bytes`: see `HostPool`. `copies`: counts of an earlier controller."""
        if layer_timeout_s <= 0:
            raise ConfigError(f"layer_timeout_s must be positive, got {layer_timeout_s}")
        self._backend = backend
        self._runtime = runtime
        self._layer_timeout_s = layer_timeout_s
        self._rank, self._device = rank, device
        self._host_trailer_bytes = host_trailer_bytes
        self.copies = RankCopies() if copies is None else copies
        self._open: _Caches | None = None
        self._kept: HostPool | None = None
        """Host memory for the next caches, without valid content."""

    def initialize_kv_cache(self, num_device_blocks: int, num_host_blocks: int) -> list[Any]:
        """Allocate both tiers. Returns the tensors as a flat list, layer-major, roles in role order.

        Raises `ConfigError`, with nothing allocated, if a size is invalid or exceeds the free memory, and
        `CacheStateError` if called twice without `free`.
        """
        self._require_none()
        if num_device_blocks < 1 or num_host_blocks < 0:
            raise ConfigError(f"cannot cache {num_device_blocks} device and {num_host_blocks} host blocks")
        block_bytes, kept = self._backend.layout.block_bytes, self._keeps(num_host_blocks)
        if not kept:
            self.free()  # memory of another size is useless, and may be needed now
        self._runtime.require_memory(
            device_bytes=num_device_blocks * block_bytes,
            host_bytes=0 if kept else num_host_blocks * block_bytes,
        )
        caches = self._backend.create_kv_cache(num_device_blocks, rank=self._rank, device=self._device)
        return self.attach_kv_cache(caches, num_device_blocks, num_host_blocks)

    def attach_kv_cache(self, caches: dict[str, Any], num_device_blocks: int, num_host_blocks: int) -> list[Any]:
        """As `initialize_kv_cache`, over existing tensors by name in flat order. Raises the same.

        The compute stream may still be filling them with zeros: every use of a slot waits for it. A tensor may have
        more blocks than are managed.
        """
        self._require_none()
        layers = self._device_rows(list(caches.values()), num_device_blocks)
        host = self._host_pool_of(num_host_blocks)
        timeout_s = self._layer_timeout_s
        transfers = CacheTransferManager(layers, host, self._runtime, self.copies, layer_timeout_s=timeout_s)
        self._open, self._kept = _Caches(dict(caches), host, transfers), None
        return list(caches.values())

    def _require_none(self) -> None:
        if self._open is not None:
            raise CacheStateError("the caches exist already: call free() first")

    def _host_pool_of(self, num_blocks: int) -> HostPool:
        if self._kept is not None and self._keeps(num_blocks):
            return self._kept
        self.free()
        return HostPool(self._backend.layout, num_blocks, self._runtime, trailer_bytes=self._host_trailer_bytes)

    def _keeps(self, num_blocks: int) -> bool:
        kept = self._kept
        return kept is not None and (kept.num_blocks, kept.layout) == (num_blocks, self._backend.layout)

    def _device_rows(self, tensors: list[Any], num_blocks: int) -> list[LayerRows]:
        layout = self._backend.layout
        if len(tensors) != layout.num_layers * len(layout.roles):
            raise ConfigError(f"the backend made {len(tensors)} tensors for {layout}")
        remaining, layers = iter(tensors), []
        for _layer in range(layout.num_layers):
            rows = LayerRows(
                ops.tensor_rows(tensor, num_rows=max(num_blocks, int(tensor.shape[0])), row_bytes=role.block_bytes)
                for role, tensor in zip(layout.roles, remaining, strict=False)
            )
            if any(row.on_gpu != self._runtime.on_gpu for row in rows):
                raise ConfigError("the cache tensors are not on the device of the runtime")
            layers.append(rows)
        return layers

    @property
    def layout(self) -> CacheLayout:
        return self._backend.layout

    @property
    def caches(self) -> dict[str, Any]:
        """Cache tensors by name, in flat order; empty before `initialize_kv_cache` and after `free`."""
        return {} if self._open is None else dict(self._open.tensors)

    @property
    def host_pool(self) -> HostPool:
        return self._opened.host

    @property
    def transfers(self) -> CacheTransferManager:
        return self._opened.transfers

    @property
    def _opened(self) -> _Caches:
        if self._open is None:
            raise CacheStateError("there are no caches: call initialize_kv_cache() first")
        return self._open

    def free(self, *, keep_host_memory: bool = False) -> None:
        """Free both tiers after running copies; `initialize_kv_cache` may follow. Idempotent.

        `keep_host_memory` keeps the host tier's memory, without its content, for the next caches of the same size:
        page-locking many GiB takes long. Raises `LayerSwapTimeoutError`, with nothing freed, if copies do not end
        within `layer_timeout_s`.
        """
        if self._open is not None:
            self._open.transfers.drain(self._layer_timeout_s)
            self._runtime.compute_stream.synchronize()
            self._open.transfers.close()
            self._kept, self._open = self._open.host, None
        if self._kept is not None and not keep_host_memory:
            self._kept.free()
            self._kept = None

    def check(self) -> None:
        """Raises `InvariantError`."""
        if self._open is not None:
            if self._kept is not None:
                raise InvariantError("host memory is kept for the next caches while caches are open")
            self._open.transfers.check()
            self._open.host.check()
        elif self._kept is not None:
            self._kept.check()
