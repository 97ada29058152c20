"""AttentionStoreTier: the storage tier over a store that addresses device memory and names blocks by token ids."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from ...contract.messages import BlockHashes
from ..engine.store_link import Answer
from ..engine.store_side import StoreSide
from ..engine.target import Target
from ..engine.tier import StorageTier
from ..messages import RankDone, UseNamespace
from ..namespace import Namespace
from .flushes import Flushes
from .merging import Merging
from .stores import DeviceStores
from .target import DeviceTarget

__all__ = ["AttentionStoreTier"]


class AttentionStoreTier(StorageTier):
    """Loads put blocks into the device tier; stores read them there, when a request has ended. Needs no host tier.

    `step_taken` and `pass_ended` must be told of passes: the store reads and writes what they do. With
    `StorageSettings.flush_only` nothing is loaded or stored, and the store's index follows the cache.
    """

    needs_token_ids = True
    _num_wanted = 0
    """Device slots that a request waits for: loads take none of them."""

    @cached_property
    def _merging(self) -> Merging:
        return Merging(self._link.num_ranks)

    def answered(self, answer: Answer) -> None:
        """Ranks answer loads and stores: once all have, the tier does."""
        merged = self._merging.add(answer) if isinstance(answer, RankDone) else answer
        if merged is not None:
            self._device.answered(merged)
            super().answered(merged)

    def seconds_to_next_deadline(self) -> float | None:
        left = (super().seconds_to_next_deadline(), self._device.seconds_left())
        return min((seconds for seconds in left if seconds is not None and seconds > 0), default=None)

    def _tell_namespace(self, namespace: Namespace) -> None:
        self._link.send(UseNamespace(namespace))

    def request_arrived(self, request_id: str, sequence: BlockHashes, token_ids: Sequence[int] = ()) -> None:
        if not self._settings.flush_only:
            super().request_arrived(request_id, sequence, token_ids)

    def tokens_wanted(self, num_tokens: int) -> None:
        self._num_wanted = -(-num_tokens // self._manager.config.block_size)

    def _make_target(self) -> Target:
        self._device = DeviceTarget(
            self._manager,
            self._link,
            self.counters,
            self._clock,
            self._are_slots_quiet,
            self._spare,
            self._waits_for_batch,
        )
        return self._device

    def _make_stores(self) -> StoreSide:
        if self._settings.flush_only:
            return Flushes(self._manager, self._link, self.counters, self._clock)
        return DeviceStores(
            self._manager,
            self._link,
            self.counters,
            self._clock,
            last_told=lambda: self._copies.last_told,
            are_slots_quiet=self._are_slots_quiet,
            waits_for_batch=self._waits_for_batch,
            num_wanted=lambda: self._num_wanted,
        )

    def _are_slots_quiet(self, step: int, since: float) -> bool:
        return self._copies.have_ended(step) and self._passes.have_ended(step, since)

    def _waits_for_batch(self, step: int) -> bool:
        return self._passes.are_doubted or step > self._copies.last_told

    def _spare(self) -> int:
        """Running requests keep an eighth of the tier to grow into, beside what one waits for."""
        reserve = self._num_wanted + self._manager.num_device_blocks // 8
        return self._manager.num_available_device_blocks - reserve
