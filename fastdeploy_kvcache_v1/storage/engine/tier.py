"""StorageTier: the storage tier as the engine sees it. Decides what is loaded and stored, and waits for nothing."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Container, Sequence
from dataclasses import replace
from typing import Any

from ...contract.messages import BlockHash, BlockHashes, CacheLevel, SwapStep, WorkerReport
from ...scheduler.cache_manager import CacheManager
from ...telemetry.metrics import gauge_of, histogram, part, source
from ..messages import Failing, LoadDone, QueryDone, StoreDone, TouchDone
from ..namespace import Namespace
from ..settings import StorageSettings
from .counters import StorageCounters
from .fetches import Fetches
from .known_blocks import KnownBlocks
from .open_copies import OpenCopies
from .open_passes import OpenPasses, Passes
from .store_costs import ComputeSeconds
from .store_link import Answer, CommandLink, StoreLink
from .store_side import StoreSide
from .stores import Stores
from .target import HostTarget, Target

__all__ = ["StorageTier"]

HELD_S = 60.0
"""A store that keeps device slots for longer than that will not give them back, as far as requests are concerned."""

LOOK_AGAIN_S = 1.0
"""After a deadline has passed, as long as what depended on it has not ended."""


@source("storage tier")
class StorageTier:
    """Beside a `CacheManager`, on the thread that schedules. A failing, slow or hanging store costs hits, nothing else.

    Loads put blocks into the host tier, where a match finds them; stores read them there. A subclass may choose another
    tier, by another `Target` and another `StoreSide`.
    """

    counters: StorageCounters = part(StorageCounters, "storage_")
    observe_latency: Callable[[str, float], None] = histogram(
        "Time that one request to the store took, by operation (query, load, store, flush)",
        "storage_latency_seconds",
        each=("operation",),
        buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
    )
    """Told of each request to the store that did not fail."""
    needs_token_ids = False
    """The store names blocks by token ids: `request_arrived` and `request_ended` must be given them."""

    def __init__(
        self,
        manager: CacheManager,
        settings: StorageSettings,
        namespace: Namespace | None,
        link: StoreLink | CommandLink,
        *,
        clock: Callable[[], float] = time.monotonic,
        passes: Passes | None = None,
    ) -> None:
        """Without a `namespace` nothing is loaded or stored until `use_namespace` names one. `passes`: how it is known
        which ones have ended, if not by `pass_ended`.
        """
        self.counters = StorageCounters()
        self.observe_latency = lambda operation, seconds: None
        self._manager = manager
        self._settings = settings
        self._link: Any = link
        """Of the kind that the subclass needs."""
        self._clock = clock
        self._copies = OpenCopies(link.num_ranks)
        self._passes = OpenPasses() if passes is None else passes
        self.known = KnownBlocks()
        self._target = self._make_target()
        self._fetches = Fetches(manager, settings, self._target, self.counters, clock, self.known)
        self._stores = self._make_stores()
        self._namespace: Namespace | None = None
        """None: what is stored now would get the name of other weights."""
        if namespace is not None:
            self.use_namespace(namespace)

    def weigh(self, compute_s: ComputeSeconds) -> None:
        """From here on requests do not wait for what is sooner computed than loaded. Before, all wait."""
        self._fetches.costs.compute_s = compute_s

    def _make_target(self) -> Target:
        return HostTarget(self._manager, self._link, self._copies)

    def _make_stores(self) -> StoreSide:
        return Stores(self._manager, self._link, self._copies, self.counters, self._clock, self.known)

    # ---- requests

    def request_arrived(self, request_id: str, sequence: BlockHashes, token_ids: Sequence[int] = ()) -> None:
        """A request waits to be scheduled: its stored prefix is fetched meanwhile. `token_ids` are those of `sequence`;
        only stores that name blocks by them look. Nothing is fetched for one that does not read the cache.
        """
        if self._namespace is not None and sequence.access.reads:
            self._fetches.arrived(request_id, sequence, token_ids)

    def look_again(self) -> None:
        """Stored blocks of waiting requests are fetched again, if they have left the cache. Before each schedule."""
        if self._namespace is not None:
            self._fetches.look_again()

    def expects(self, request_id: str) -> bool:
        """The request has arrived, and has not left."""
        return self._fetches.expects(request_id)

    def may_start(self, request_id: str) -> bool:
        """False while the request should go on waiting for its stored prefix, see `Prefetch`."""
        return self._fetches.may_start(request_id)

    def request_passes(self, request_id: str) -> None:
        """The request does not ask `may_start`: it starts when there is room for it. Until then blocks are fetched."""
        self._fetches.pass_by(request_id)

    def request_left(self, request_id: str) -> None:
        """The request was scheduled, or is gone. Nothing happens for one that waits for nothing."""
        self._fetches.started(request_id)

    def unused(self, level: CacheLevel) -> Container[BlockHash]:
        """Blocks that were loaded into tier `level`, and that no request has used."""
        return self._fetches.unused if level is self._target.level else ()

    def request_used(self, hashes: Sequence[BlockHash]) -> None:
        """A request has started from these blocks."""
        if self._fetches.unused:
            self._fetches.unused.deleted(hashes)

    def request_ended(self, sequence: BlockHashes, token_ids: Sequence[int]) -> None:
        """A request that has computed is over, however it ended, and was taken from the cache manager."""
        if self._namespace is not None and sequence.access.writes:
            self._stores.request_ended(sequence, token_ids)

    def tokens_wanted(self, num_tokens: int) -> None:
        """A request of so many tokens waits for device blocks, for as long as this is not told anew; 0: none does."""

    def seconds_to_next_deadline(self) -> float | None:
        """After this time `may_start`, `holds_device_blocks` or what `go_on` does may change although nothing else
        happens; None for never.
        """
        held = self._held_since()
        left = (
            self._fetches.seconds_to_next_deadline(),
            self._stores.seconds_to_next_deadline(),
            None if held is None else held + HELD_S - self._clock(),
        )
        # One that is past may have passed since the caller last looked at what depends on it.
        return min((seconds if seconds > 0 else LOOK_AGAIN_S for seconds in left if seconds is not None), default=None)

    @property
    def holds_device_blocks(self) -> bool:
        """Device slots are lent to the store, and will soon be back."""
        held = self._held_since()
        return held is not None and self._clock() - held < HELD_S

    def _held_since(self) -> float | None:
        times = (self._fetches.lent_since(), self._stores.held_since())
        return min((time for time in times if time is not None), default=None)

    # ---- steps

    def step_taken(self, step: SwapStep, *, computes: bool = False) -> None:
        """The workers are being told of `step`, and whether it has a forward pass: `pass_ended` follows then."""
        self._copies.told(step)
        self._passes.told(step.step, computes=computes)

    def pass_ended(self, step: int) -> None:
        """The forward pass of `step` has ended on every rank and its device."""
        self._passes.ended(step)

    def copies_reported(self, rank: int, report: WorkerReport) -> None:
        """A rank says what became of its copies. After `CacheManager.transfer_failed`."""
        for step, slots in self._copies.reported(rank, report):
            if self._namespace is not None:
                self._stores.filled(step, slots)
        for result in report.transfers:
            if not result.ok:
                self._stores.copy_failed(result)

    def go_on(self) -> None:
        """Begin what can begin now: after reports, answers, and steps."""
        self._fetches.go_on()
        if self._namespace is not None:
            self._stores.go_on()

    def copies_doubted(self, through: int) -> None:
        """Copies of the steps up to `through` may have failed untold: nothing that they fill is stored."""
        self._copies.forget_filled(through)
        self._stores.copies_doubted()

    # ---- the store

    def answered(self, answer: Answer) -> None:
        """What the link delivers, in order."""
        if isinstance(answer, Failing):
            self._fetches.load_failing(answer)
        elif isinstance(answer, TouchDone):
            self._stores.in_use(self._fetches.touch_done(answer), answer.num_stored)
        else:
            self._heard(answer)
        self.go_on()

    def _heard(self, answer: Answer) -> None:
        assert isinstance(answer, LoadDone | StoreDone | QueryDone)
        if answer.error is None:
            self.observe_latency(answer.operation, answer.seconds)
        if isinstance(answer, LoadDone):
            self._fetches.load_done(answer)
        elif isinstance(answer, StoreDone):
            self._stores.store_done(answer)
        else:
            self._fetches.query_done(answer)

    # ---- administration

    def cache_reset(self) -> None:
        """`CacheManager.reset_cache` was called: what is under way ends, and is not wanted."""
        self._copies.forget_filled(None)
        self._fetches.forget()
        self._stores.cache_reset()

    def use_namespace(self, namespace: Namespace) -> None:
        """From here on blocks have other bytes, after a weight update for example. After `cache_reset`."""
        self._namespace = namespace
        self.known.forget()
        self._tell_namespace(namespace)

    def _tell_namespace(self, namespace: Namespace) -> None:
        self._link.use_namespace(namespace)

    def forget_namespace(self) -> None:
        """Nothing is loaded or stored until `use_namespace` names another one. After `cache_reset`."""
        self._namespace = None
        self.known.forget()

    def forget_stored(self) -> None:
        """No block that was stored before is found; what is stored from here on this tier alone finds. After
        `cache_reset`.
        """
        if self._namespace is not None:
            self.use_namespace(replace(self._namespace, weight_epoch=uuid.uuid4().hex))

    @property
    def is_idle(self) -> bool:
        """No slot is lent to the store, and none is kept for it."""
        return self._fetches.is_idle and self._stores.is_idle

    @property
    @gauge_of("Requests that wait for their stored prefix", "storage_waiting_requests")
    def num_waiting_requests(self) -> int:
        """Any thread may read it."""
        return self._fetches.num_waiting_requests

    @property
    @gauge_of("1 while the store is not used: it has failed, or has not started", "storage_is_left_alone")
    def is_left_alone(self) -> bool:
        """Any thread may read it."""
        return self._fetches.is_left_alone or self._stores.is_left_alone
