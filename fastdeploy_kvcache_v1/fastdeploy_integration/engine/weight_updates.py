"""Weight updates of FastDeploy's legacy API: answers for its transfer process and cache manager; a gate for batches.

One update, by API process, worker W, this thread P and the schedule loop S. W drops everything that it holds or that is
queued for it, twice, and the scheduler is not told; the status of the tree follows only afterwards:

    weights NORMAL -> CLEARING     by the API. From here on S gets no batch
    weights -> CLEARED             by W, which then drops its caches and what is queued, and sleeps
    tree NORMAL -> CLEARING        by the API
    tree -> CLEARED                by P, when the cache is empty and no older batch can be put into the queue any more
    weights CLEARED -> UPDATING    by the API
    weights -> NORMAL              by W, which only then drops what is queued, and goes back to its loop
    tree CLEARED -> UPDATING       by the API, perhaps before W has dropped what is queued
    tree -> NORMAL                 by P, when W has been seen in its loop. S gets batches again
    the next batch                 S lets all requests start again, over an empty cache

The API may give up between any two lines; whatever was done up to there, no batch passes until both are NORMAL again.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

logger = logging.getLogger(__name__)

NORMAL, UPDATING, CLEARING, CLEARED = 0, 1, -1, -2
"""Values of FastDeploy's ModelWeightsStatus, PrefixTreeStatus and KVCacheStatus."""

POLL_S = 0.01
QUEUE_POLL_S = 0.001
ANSWERS = {CLEARING: CLEARED, UPDATING: NORMAL}

Result = TypeVar("Result")


class WeightUpdates:
    """Thread-safe. `cache` has `batch_dropped`; each signal is an array of FastDeploy in `.value`.

    `heartbeats`: one time per worker rank of this machine, which the rank changes each second, in its loop only.
    `copies`: the status of the transfer process; None where FastDeploy does not wait for it.

    Its lock comes before every other one, and is held while a batch is put into the queue.
    """

    def __init__(self, cache: Any, *, weights: Any, tree: Any, heartbeats: Any, copies: Any | None) -> None:
        self._cache = cache
        self._weights = weights
        self._tree = tree
        self._heartbeats = heartbeats
        self._copies = copies
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._is_open = True
        self._epoch = 0
        """How often weights went away: a batch belongs to the time between two."""
        self._are_weights_counted = False
        """`_epoch` already says that they went away."""
        self._last_beats: list[int] | None = None
        """Heartbeats when the weights were found to be back."""

    def start(self) -> None:
        threading.Thread(target=self._run, name="kvcache-v1-weights", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    # ---- the schedule loop

    def enter(self) -> int | None:
        """The epoch of a batch that is scheduled now, or None when none may be."""
        with self._lock:
            if self._weights.value[0] != NORMAL:
                self._close_for_weights()
            return self._epoch if self._is_open else None

    def put(self, epoch: int, is_occupied: Callable[[], bool], put: Callable[[], Result]) -> Result | None:
        """Call `put`, which must not wait for room in the queue: `is_occupied` tells when there is none.

        A batch of an earlier epoch is not put: workers may have dropped what was queued for the last time.
        """
        while True:
            with self._lock:
                if epoch != self._epoch:
                    logger.info("a batch from before a weight update was dropped; its requests start again")
                    return None
                if not is_occupied():
                    return put()
            time.sleep(QUEUE_POLL_S)

    def _close_for_weights(self) -> None:
        self._is_open = False
        self._last_beats = None
        if not self._are_weights_counted:
            self._are_weights_counted = True
            self._epoch += 1

    # ---- the thread

    def poll(self) -> None:
        """Follow the signals and answer what is asked now."""
        with self._lock:
            if self._weights.value[0] != NORMAL:
                self._close_for_weights()
            elif self._last_beats is None:
                self._last_beats = self._beats()
            self._answer()
        if self._copies is not None and (answer := ANSWERS.get(int(self._copies.value[0]))) is not None:
            self._copies.value[0] = answer

    def _answer(self) -> None:
        asked = int(self._tree.value[0])
        if asked == CLEARING:
            self._is_open = False
            self._cache.batch_dropped()
            self._tree.value[0] = CLEARED
        elif not self._is_open and asked in (UPDATING, NORMAL) and self._workers_are_back():
            self._is_open, self._are_weights_counted = True, False
            if asked == UPDATING:
                self._tree.value[0] = NORMAL

    def _workers_are_back(self) -> bool:
        """Every rank was in its loop after the weights were NORMAL again, so none will drop what is queued now."""
        last = self._last_beats
        return last is not None and all(now != then for now, then in zip(self._beats(), last, strict=True))

    def _beats(self) -> list[int]:
        return [int(beat) for beat in self._heartbeats.value]

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                self.poll()
            except Exception:  # the edge of a thread: the waiting call times out, the next update may work
                logger.exception("a weight update was not answered: repeat it")


def start_again(manager: Any) -> None:
    """Put every request that `manager` (FastDeploy's ResourceManagerV1) has given to the workers back in its queue.

    The workers have forgotten them. They wait like new ones, in order of arrival, without a seat: 2.6 schedules none
    while preempted requests, which keep theirs, hold all seats. Output so far is kept and computed anew. An abortion
    that was not confirmed is asked for again.
    """
    manager.preempted_all()
    with manager.lock:
        preempted = manager.to_be_rescheduled_request_id_set
        aborted = manager.to_be_aborted_req_id_set & manager.requests.keys()  # 2.5 keeps ids of some that have ended
        manager.waiting_abort_req_id_set.update(aborted)
        preempted.update(aborted)
        manager.to_be_aborted_req_id_set.clear()
        again = [request for request in manager.requests.values() if request.request_id in preempted]
        for request in again:
            manager.tasks_list[request.idx], manager.stop_flags[request.idx] = None, True
            request.status = type(request.status).WAITING
            request.need_prefill_tokens = request.num_total_tokens
    for request in reversed(again):  # each goes to the front
        manager.reschedule_preempt_task(request.request_id)
