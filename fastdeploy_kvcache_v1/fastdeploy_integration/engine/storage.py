"""EngineStorage: the storage tier inside FastDeploy's engine.

A request whose prefix may be stored waits outside FastDeploy's queue until the prefix is there, or took too long:
FastDeploy fetches no new requests while one of its own queue waits, and those behind it are served meanwhile.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from ...contract.messages import SwapStep, WorkerReport
from ...errors import KVCacheError, StorageError
from ...storage.engine.link import StorageLink
from ...storage.engine.store_link import Answer
from ...storage.engine.tier import StorageTier
from ...storage.messages import Connect, Connected
from ...storage.namespace import Namespace
from ...storage.process import StoreProcess
from .rank_passes import RankPasses
from .task_tokens import TaskTokens

logger = logging.getLogger(__name__)

MOST_HELD = 32
"""Requests that wait at the same time. The next ones go straight to FastDeploy's queue, and are fetched for there."""

WORKERS_TIMEOUT_S = 60.0
"""For the ranks' storage threads: the workers have been started long ago."""

UNHEARD_S = 600.0
"""A request that FastDeploy took, and does not know after so long, is gone. A prefill server knows requests with a seat
alone.
"""

DRAIN_S = 60.0
"""FastDeploy waits so long until no request is preempted, before it pauses for example."""

CONNECT_TIMEOUT_S = 360.0
"""For all ranks to use the store; each gives up by itself before."""


class EngineStorage:
    """Thread-safe: `lock` is the lock of the cache manager that `tier` stands beside. Nothing here waits."""

    def __init__(
        self,
        tier: StorageTier,
        link: StoreProcess | StorageLink,
        *,
        lock: threading.RLock,
        find_namespace: Callable[[], Namespace],
        passes: RankPasses | None = None,
        log: logging.Logger = logger,
    ) -> None:
        """`find_namespace` reads the whole model. `passes`: those of `tier`, where it must know when they end."""
        self.tier = tier
        self.link = link
        self._lock: Any = lock
        self._find_namespace = find_namespace
        self._passes = passes
        self._log = log
        self._weight_epoch: str | None = None
        """None as long as the weights are those of the namespace."""
        self._namespace: Namespace | None = None
        self._is_named = False
        self._answers: deque[Answer] = deque()
        self._connected: queue.SimpleQueue[Connected] = queue.SimpleQueue()
        self._held: dict[str, Any] = {}
        """Requests that wait here, by id, in order of arrival."""
        self._drains_until = 0.0
        """No preempted request waits here before (`time.monotonic`)."""
        self._released: dict[str, Any] = {}
        """Requests on their way from here to FastDeploy's queue."""
        self._ahead: dict[str, float] = {}
        """Requests that FastDeploy has taken and that blocks are still fetched for. When one that FastDeploy does not
        know yet is gone (`time.monotonic`).
        """

    def start(self, run: Callable[[Callable[[], None]], None] | None = None) -> None:
        """Listen to the workers' storage threads, and look for the namespace on a thread, or as `run` does: requests
        are served without storage until it is found.
        """
        self.link.listen(self._take)
        if run is not None:
            run(self._find)
        else:
            threading.Thread(target=self._find, name="kv-storage-name", daemon=True).start()

    def start_connected(self) -> None:
        """As `start`, over a link to agents: returns when every rank can use the store, which may take minutes.

        Raises `KVCacheError` when that does not come about.
        """
        link: Any = self.link
        link.listen(self._take)
        self._namespace = self._find_namespace()
        deadline = time.monotonic() + WORKERS_TIMEOUT_S
        while not link.is_ready:
            if time.monotonic() > deadline:
                raise StorageError("got no answer from the workers' storage threads: see log/workerlog.N")
            time.sleep(0.01)
        with self._lock:
            self._name()
        link.send(Connect())
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        for _ in range(link.num_ranks):
            try:
                answer = self._connected.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                raise StorageError(f"the store was not ready on all ranks within {CONNECT_TIMEOUT_S:.0f} s") from None
            if answer.error is not None:
                raise StorageError(f"{answer.error} (rank {answer.rank})")

    def _take(self, answer: Answer) -> None:
        if isinstance(answer, Connected):
            self._connected.put(answer)
        else:
            self._answers.append(answer)

    def close(self) -> None:
        """Nothing is loaded or stored any more. Idempotent."""
        self.link.close()

    def _find(self) -> None:
        try:
            self._namespace = self._find_namespace()
        except KVCacheError as error:
            self._log.error("the storage tier stays off: %s", error)
        except Exception:  # the edge of the thread: requests are served without storage
            self._log.exception("the storage tier stays off: the digest of the weights failed")

    # ---- requests

    def hold(self, request: Any, tokens: TaskTokens) -> bool:
        """Whether `request`, whose tokens are `tokens`, waits here now. If not, it may start."""
        with self._lock:
            request_id: str = request.request_id
            self.tier.request_arrived(request_id, tokens, self._token_ids(tokens))
            drains = _is_preempted(request) and time.monotonic() < self._drains_until
            if self.tier.may_start(request_id) or len(self._held) >= MOST_HELD or drains:
                self._goes_on(request_id)
                return False
            self._held[request_id] = request
            return True

    def holds(self, request_id: str) -> bool:
        """Whether a request of that id is here."""
        return request_id in self._held or request_id in self._released

    def release(self, manager: Any) -> list[Any]:
        """The requests that wait no longer, in order of arrival. Once per `schedule` of `manager` (FastDeploy's
        ResourceManagerV1), before it matches anything.
        """
        num_wanted = 0 if self._passes is None else _num_wanted_tokens(manager)
        with self._lock:
            self.tier.tokens_wanted(num_wanted)
            while self._answers:
                self.tier.answered(self._answers.popleft())
            self._name()
            aborted, now = manager.waiting_abort_req_id_set, time.monotonic()
            for request_id, gone_at in list(self._ahead.items()):
                if request_id in manager.requests:
                    self._ahead[request_id] = 0.0
                elif now >= gone_at or request_id in aborted:
                    self._leave(request_id)
            self.tier.look_again()
            self._let_go([each for each in self._held if each in aborted or self.tier.may_start(each)])
            self.tier.go_on()
            return list(self._released.values())

    def drain(self) -> list[Any]:
        """FastDeploy waits until no request is preempted: returns those that waited here, and keeps none."""
        with self._lock:
            self._drains_until = time.monotonic() + DRAIN_S
            self._let_go([request_id for request_id, request in self._held.items() if _is_preempted(request)])
            return [request for request in self._released.values() if _is_preempted(request)]

    def release_all(self) -> None:
        """No request waits for its stored prefix any longer."""
        with self._lock:
            self._let_go(list(self._held))

    def _let_go(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._goes_on(request_id)
            self._released[request_id] = self._held[request_id]  # `holds` looks at any time
            del self._held[request_id]

    def has_released(self, request: Any) -> bool:
        """Whether `request` has waited here, and is on its way to FastDeploy's queue."""
        return self._released.get(request.request_id) is request

    def queued(self, request: Any) -> None:
        """A released request is in FastDeploy's queue."""
        self._released.pop(request.request_id, None)

    def take_released(self, most: int) -> list[Any]:
        """Up to `most` released requests, in order of arrival. They are not here any more: `queued` is not told."""
        with self._lock:
            return [self._released.pop(each) for each in list(self._released)[: max(most, 0)]]

    def _goes_on(self, request_id: str) -> None:
        """The request is FastDeploy's. As long as it waits there, its blocks are still fetched."""
        self.tier.request_passes(request_id)
        self._ahead[request_id] = time.monotonic() + UNHEARD_S

    def _leave(self, request_id: str) -> None:
        self._ahead.pop(request_id, None)
        self.tier.request_left(request_id)

    def clear(self) -> None:
        """FastDeploy has ended every request."""
        with self._lock:
            for request_id in [*self._held, *self._ahead]:
                self._leave(request_id)
            self._held.clear()
            self._released.clear()

    def must_wait(self, request: Any) -> bool:
        """Whether a request that was preempted waits for device blocks that the store will soon give back: it could be
        preempted again for want of them, and again.
        """
        return _is_preempted(request) and self.tier.holds_device_blocks

    def request_ended(self, tokens: TaskTokens) -> None:
        """A request that has computed gave its blocks back: it has finished, or was preempted or aborted."""
        with self._lock:
            self.tier.request_ended(tokens, self._token_ids(tokens))

    def _token_ids(self, tokens: TaskTokens) -> Sequence[int]:
        return tokens.token_ids() if self.tier.needs_token_ids else ()

    # ---- batches

    @property
    def follows_passes(self) -> bool:
        """Every batch must carry a step, and ranks tell which one they have taken."""
        return self._passes is not None

    def batch_lost(self) -> None:
        """The last batch never reached the workers, or perhaps did."""
        if self._passes is not None:
            self._passes.doubt()

    def rows_dropped(self) -> None:
        """FastDeploy has forgotten requests that the workers go on computing."""
        with self._lock:
            if self._passes is not None:
                self._passes.doubt(rows_stay=True)

    def batch_scheduled(self, tasks: Sequence[Any], step: SwapStep) -> None:
        """The workers are being told of `tasks`, and of `step`."""
        with self._lock:
            self.tier.step_taken(step)
            for task in tasks if self._ahead else ():
                if task.request_id in self._ahead:
                    self._leave(task.request_id)
            self.tier.go_on()

    def copies_reported(self, reports: Sequence[tuple[int, WorkerReport]]) -> None:
        """After `CacheManager.transfer_failed`."""
        with self._lock:
            for rank, report in reports:
                if report.unlisted_through >= 0:
                    self.tier.copies_doubted(report.unlisted_through)
                self.tier.copies_reported(rank, report)
                if self._passes is not None and report.passes is not None:
                    self._passes.reported(rank, report.passes)

    # ---- administration

    def cache_reset(self) -> None:
        """`CacheManager.reset_cache` was called, and batches may be lost on their way to the workers."""
        with self._lock:
            self.tier.cache_reset()
            self.batch_lost()

    def weights_changed(self) -> None:
        """The workers are getting other weights, and nobody knows which: blocks from here on are found by this engine
        alone, and only until the weights change again. After the cache was reset, before anything is computed.
        """
        with self._lock:
            self._weight_epoch = uuid.uuid4().hex
            self._is_named = False
            self.tier.cache_reset()
            self.tier.forget_namespace()
            self._name()
            self._log.info("the weights may be other ones: blocks stored before are not used any more")

    def _name(self) -> None:
        if self._is_named or self._namespace is None:
            return
        self._is_named = True
        epoch = self._weight_epoch or self._namespace.weight_epoch
        self.tier.use_namespace(replace(self._namespace, weight_epoch=epoch))


def _is_preempted(request: Any) -> bool:
    return bool(request.status.name == "PREEMPTED")


def _num_wanted_tokens(manager: Any) -> int:
    """Of the next request in FastDeploy's queue, or of a preempted one that is on its way there. Takes FastDeploy's
    lock, which others hold when they ask for the adapter's.
    """
    with manager.lock:
        preempted = (manager.requests.get(request_id) for request_id in manager.to_be_rescheduled_request_id_set)
        waiting = [request for request in preempted if request is not None]
        if manager.waiting:
            waiting.append(manager.waiting[0])
        return max((int(request.num_total_tokens) for request in waiting), default=0)
