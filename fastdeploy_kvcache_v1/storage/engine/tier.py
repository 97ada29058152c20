"""StorageTier: the storage tier as the engine sees it. Decides what is loaded and stored, and waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable

from ...metadata import BlockHashes, SwapStep, TransferReport
from ...scheduler.cache_manager import CacheManager
from ..messages import LoadDone, QueryDone, StoreDone, UseNamespace
from ..namespace import Namespace
from ..settings import StorageSettings
from .counters import StorageCounters
from .fetches import Fetches
from .link import Answer, Link
from .open_copies import OpenCopies
from .stores import Stores

__all__ = ["StorageTier"]

OPERATIONS = {QueryDone: "query", LoadDone: "load", StoreDone: "store"}


class StorageTier:
    """Beside a `CacheManager`, on the thread that schedules. A failing, slow or hanging store costs hits, nothing else.

    Loads put blocks into the host tier, where a match finds them; stores read them there.
    """

    def __init__(
        self,
        manager: CacheManager,
        settings: StorageSettings,
        namespace: Namespace | None,
        link: Link,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Without a `namespace` nothing is loaded or stored until `use_namespace` names one."""
        self.counters = StorageCounters()
        self.observe_latency: Callable[[str, float], None] = lambda operation, seconds: None
        """Told how long each request to the store took that did not fail: `query`, `load` or `store`, seconds."""
        self._link = link
        self._copies = OpenCopies(link.num_ranks)
        self._fetches = Fetches(manager, settings, link, self._copies, self.counters, clock)
        self._stores = Stores(manager, link, self._copies, self.counters, clock)
        self._is_named = False
        if namespace is not None:
            self.use_namespace(namespace)

    # ---- requests

    def request_arrived(self, request_id: str, sequence: BlockHashes) -> None:
        """A request waits to be scheduled: its stored prefix is fetched meanwhile."""
        if self._is_named:
            self._fetches.arrived(request_id, sequence)
            self._fetches.go_on()

    def may_start(self, request_id: str) -> bool:
        """False while the request should go on waiting for its stored prefix, see `Prefetch`."""
        return self._fetches.may_start(request_id)

    def request_left(self, request_id: str) -> None:
        """The request was scheduled, or is gone. Nothing happens for one that waits for nothing."""
        self._fetches.started(request_id)

    def seconds_to_next_deadline(self) -> float | None:
        """After this time `may_start` may change although nothing else happens; None for never."""
        return self._fetches.seconds_to_next_deadline()

    # ---- steps

    def step_taken(self, step: SwapStep) -> None:
        """The workers are being told of `step`."""
        self._copies.told(step)

    def copies_reported(self, rank: int, report: TransferReport) -> None:
        """A rank says what became of its copies. After `CacheManager.transfer_failed`."""
        for step, slots in self._copies.reported(rank, report):
            if self._is_named:
                self._stores.filled(step, slots)

    def go_on(self) -> None:
        """Begin what can begin now: after reports, answers, and steps."""
        self._fetches.go_on()
        self._stores.go_on()

    def copies_doubted(self, through: int) -> None:
        """Copies of the steps up to `through` may have failed untold: nothing that they fill is stored."""
        self._copies.forget_filled(through)

    # ---- the store

    def answered(self, answer: Answer) -> None:
        """What the link delivers, in order."""
        if answer.error is None:
            self.observe_latency(OPERATIONS[type(answer)], answer.seconds)
        if isinstance(answer, LoadDone):
            self._fetches.load_done(answer)
        elif isinstance(answer, StoreDone):
            self._stores.store_done(answer)
        else:
            assert isinstance(answer, QueryDone)
            self._fetches.query_done(answer)
        self.go_on()

    # ---- administration

    def cache_reset(self) -> None:
        """`CacheManager.reset_cache` was called: what is under way ends, and is not wanted."""
        self._copies.forget_filled(None)
        self._fetches.forget()

    def use_namespace(self, namespace: Namespace) -> None:
        """From here on blocks have other bytes, after a weight update for example. After `cache_reset`."""
        self._is_named = True
        self._link.send(UseNamespace(namespace))

    @property
    def is_idle(self) -> bool:
        """No slot is lent to the store, and none is kept for it."""
        return self._fetches.is_idle and self._stores.is_idle

    @property
    def is_left_alone(self) -> bool:
        """The store failed again and again, and is not asked for a while."""
        return self._fetches.is_left_alone or self._stores.is_left_alone
