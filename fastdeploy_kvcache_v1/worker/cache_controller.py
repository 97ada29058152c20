"""CacheController: the worker half's front door. Owns cache tensors and host pool; moves bytes, decides nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from ..attention.base import AttentionCacheBackend, CacheLayout
from ..errors import CacheStateError, ConfigError, InvariantError
from ..metadata import SWAP_IN, CacheLevel, SwapStep, TransferReport, TransferResult
from . import ops
from .hazards import HazardTable
from .host_pool import HostPool
from .layer_done_counter import LayerDoneCounter
from .ops import LayerRows
from .runtime import Event, Runtime
from .slot_set import SlotSet
from .transfer_manager import CacheTransferManager

__all__ = ["CacheController"]


class CacheController:
    """Caches and copies of one rank. Not thread-safe: one worker thread uses it.

    Per step: `submit_swap_tasks`, `before_compute`, the forward pass (which waits for each layer with the counter),
    `after_compute`, `take_results`. Nothing here blocks but the waits a CPU forward pass really needs.
    `layer_timeout_s` bounds each of those waits.
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
        host_is_shared: bool = False,
    ) -> None:
        """`host_trailer_bytes`, `host_is_shared`: see `HostPool`."""
        if layer_timeout_s <= 0:
            raise ConfigError(f"layer_timeout_s must be positive, got {layer_timeout_s}")
        self._backend = backend
        self._runtime = runtime
        self._layer_timeout_s = layer_timeout_s
        self._rank, self._device = rank, device
        self._host_trailer_bytes = host_trailer_bytes
        self._host_is_shared = host_is_shared
        self._caches: dict[str, Any] = {}
        self._host: HostPool | None = None
        self._kept: HostPool | None = None
        """Host memory without caches, for the next ones; what is in it means nothing."""
        self._transfer_manager: CacheTransferManager | None = None
        self._last_step = -1

    def initialize_kv_cache(self, num_device_blocks: int, num_host_blocks: int) -> list[Any]:
        """Allocate both tiers. Returns the tensors as a flat list, layer-major, roles in role order.

        Raises `ConfigError`, with nothing allocated, when a size cannot work or does not fit the free memory, and
        `CacheStateError` when called twice without `free`.
        """
        if self._transfer_manager is not None:
            raise CacheStateError("the caches exist already: call free() first")
        if num_device_blocks < 1 or num_host_blocks < 0:
            raise ConfigError(f"cannot cache {num_device_blocks} device and {num_host_blocks} host blocks")
        block_bytes, kept = self._backend.layout.block_bytes, self._keeps(num_host_blocks)
        if not kept:
            self.free()  # memory of another size is of no use, and may be what is missing
        self._runtime.require_memory(
            device_bytes=num_device_blocks * block_bytes,
            host_bytes=0 if kept else num_host_blocks * block_bytes,
        )
        caches = self._backend.create_kv_cache(num_device_blocks, rank=self._rank, device=self._device)
        return self.attach_kv_cache(caches, num_device_blocks, num_host_blocks)

    def attach_kv_cache(self, caches: dict[str, Any], num_device_blocks: int, num_host_blocks: int) -> list[Any]:
        """As `initialize_kv_cache`, over tensors that exist already, given by name in flat order.

        What fills them with zeros may still run on the compute stream: every use of a slot waits for it. A tensor may
        have more blocks than are managed. Raises as `initialize_kv_cache`.
        """
        if self._transfer_manager is not None:
            raise CacheStateError("the caches exist already: call free() first")
        layers = self._device_rows(list(caches.values()), num_device_blocks)
        host = self._host_pool_of(num_host_blocks)
        self._transfer_manager = CacheTransferManager(
            layers, host, self._runtime, layer_timeout_s=self._layer_timeout_s
        )
        self._caches, self._host, self._kept, self._last_step = caches, host, None, -1
        return list(caches.values())

    def _host_pool_of(self, num_blocks: int) -> HostPool:
        if self._kept is not None and self._keeps(num_blocks):
            return self._kept
        self.free()
        return HostPool(
            self._backend.layout,
            num_blocks,
            self._runtime,
            trailer_bytes=self._host_trailer_bytes,
            shared=self._host_is_shared,
        )

    def _keeps(self, num_blocks: int) -> bool:
        """Whether the host memory of before is what `num_blocks` blocks need now."""
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
        """Of the caches, whether they are allocated or not."""
        return self._backend.layout

    @property
    def caches(self) -> dict[str, Any]:
        """The cache tensors by name, in flat order. Empty before `initialize_kv_cache` and after `free`."""
        return dict(self._caches)

    @property
    def host_pool(self) -> HostPool:
        """Where a host slot's bytes are."""
        if self._host is None:
            raise CacheStateError("there are no caches: call initialize_kv_cache() first")
        return self._host

    @property
    def device_rows(self) -> tuple[LayerRows, ...]:
        """Per layer, per role: where each device block keeps its row."""
        return self._transfers.device_rows

    @property
    def device_hazards(self) -> HazardTable:
        """Uses of device slots by who is no copy and no pass are asked and told here, on any thread."""
        return self._transfers.device_hazards

    def late_writes(self, slots: Collection[int]) -> list[Event]:
        """What still writes to one of device `slots` and is in no report to come: copies that were given up, and the
        fill of new tensors. Any thread may ask; who uses slots without `device_hazards` waits for these.
        """
        return self._transfers.late_writes(slots)

    def refilled(self, slots: Sequence[int], level: CacheLevel = CacheLevel.DEVICE) -> None:
        """`slots` of tier `level` were filled from outside, and no copy writes to them any more: whatever failed there
        before is repaired. Any thread may say so, before the scheduler is told that the blocks are there.
        """
        self._transfers.refilled(slots, level)

    @property
    def _transfers(self) -> CacheTransferManager:
        if self._transfer_manager is None:
            raise CacheStateError("there are no caches: call initialize_kv_cache() first")
        return self._transfer_manager

    def submit_swap_tasks(self, step: SwapStep, *, overwritten: SlotSet | None = None) -> LayerDoneCounter | None:
        """Start the copies of `step`, in its order where their slots meet. `overwritten`: device slots that are written
        soon after. An eviction of one of them, or of one that the step's swap-in fills, goes layer by layer then, and
        the write can follow it so. With None evictions take the fastest way.

        Never blocks. Returns the counter of the transfer that fills the device layer by layer, None when there is none.
        Raises `CacheStateError`, nothing started, for foreign slots, a target written twice, tiers that no copy path
        connects (`UnsupportedCopyError`), or a step that is not later than the last one.
        """
        transfers = self._transfers
        if step.step <= self._last_step:
            raise CacheStateError(f"swap step {step.step} came after step {self._last_step}")
        planned = [(metadata, transfers.plan(metadata)) for metadata in step.transfers]
        self._last_step = step.step
        counter: LayerDoneCounter | None = None
        soon = SlotSet() if overwritten is None else overwritten
        for metadata, runs in planned:
            if overwritten is not None and metadata.kind == SWAP_IN:
                soon |= runs.targets
        for metadata, runs in planned:
            counter = transfers.submit(step.step, metadata, runs, soon) or counter
        return counter

    def before_compute(
        self,
        read_slots: Iterable[int] | None,
        written_slots: Collection[int] | None,
        *,
        counter: LayerDoneCounter | None = None,
        by_layer: bool = False,
    ) -> LayerDoneCounter | None:
        """Compute will read and write these device slots: it waits for copies that read what it writes, and for
        copies that write what it touches. None stands for "any slot".

        The swap-in behind `counter` is left out: the forward pass waits for it layer by layer. Every other unfinished
        swap-in is waited for here, so one whose counter was dropped is safe. A slot that is read and written counts as
        written: its old content is not required to be valid.

        With `by_layer` evictions that go layer by layer are left out, too. Returns what the forward pass has to wait
        for itself: `counter`, or one that stands for it and those evictions.

        Raises `TransferError` when the copy that should have filled a read slot failed, `LayerSwapTimeoutError` when a
        copy takes longer than `layer_timeout_s` (CPU only); `failed_slots` then names the slots without content, and
        compute must not run with those. `CacheStateError` if the swap-in of `counter` fills a written slot.
        """
        return self._transfers.before_compute(read_slots, written_slots, counter, by_layer=by_layer)

    def after_compute(self, read_slots: Iterable[int] | None, written_slots: Collection[int] | None) -> Event:
        """Compute on these slots has been submitted (None: any slots): later copies that conflict wait for it. Returns
        the event of its end.

        Call it with what `before_compute` was told, also when the forward pass failed halfway.
        """
        return self._transfers.after_compute(read_slots, written_slots)

    def failed_slots(self, slots: Iterable[int]) -> list[int]:
        """The device `slots` that hold no valid data because the copy that filled them failed."""
        return self._transfers.failed_slots(slots)

    def take_results(self) -> list[TransferResult]:
        """Copies that finished or failed since the last call, each exactly once. Never blocks."""
        return self._transfers.take_results()

    def take_report(self) -> TransferReport:
        """As `take_results`, how long compute stood still for copies since the last report, and how far copies are."""
        return self._transfers.take_report(self._last_step)

    @property
    def num_unreported_copies(self) -> int:
        """Submitted copies that `take_results` has not returned yet."""
        return self._transfers.num_unreported

    def drain(self, timeout: float | None = None) -> None:
        """Block until no copy is running. Raises `LayerSwapTimeoutError`. Results stay for `take_results`."""
        self._transfers.drain(timeout)

    def free(self, *, keep_host_memory: bool = False) -> None:
        """Give both tiers back once running copies ended; `initialize_kv_cache` may follow. Idempotent.

        With `keep_host_memory` only the device tier: allocating and page-locking many GiB takes long, so a next start
        of the same size gets the same memory. Its content counts as lost either way.
        Raises `LayerSwapTimeoutError`, nothing freed, when copies do not end within `layer_timeout_s`: the memory is
        still being written.
        """
        if self._transfer_manager is not None:
            self._finish_copies()
            self._transfer_manager.close()
            self._kept = self._host
            self._transfer_manager, self._host = None, None
            self._caches = {}
        if self._kept is not None and not keep_host_memory:
            self._kept.free()
            self._kept = None

    def _finish_copies(self) -> None:
        self._transfers.drain(self._layer_timeout_s)
        self._runtime.compute_stream.synchronize()

    def check(self) -> None:
        """Raises `InvariantError`."""
        if (self._transfer_manager is None) != (self._host is None) or bool(self._caches) != (self._host is not None):
            raise InvariantError("the caches are half initialized")
        if self._host is not None and self._kept is not None:
            raise InvariantError("host memory is kept for the next caches while there are some")
        if self._kept is not None:
            self._kept.check()
        if self._transfer_manager is not None and self._host is not None:
            self._transfer_manager.check()
            self._host.check()
