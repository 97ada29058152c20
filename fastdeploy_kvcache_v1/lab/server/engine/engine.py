"""The engine thread: owns the scheduler half and talks to the worker."""

from __future__ import annotations

import concurrent.futures
import logging
import queue
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from ....contract.messages import WorkerReport
from ....storage.engine.store_link import Answer as StorageAnswer
from ....transfer.rank_messages import TransferNews
from ...model.step import LayerComputed, StepResult
from ..prefill_job import PrefillAnswer
from .engine_core import EngineCore
from .generation import Failure, Generation

if TYPE_CHECKING:
    from ..worker.client import ProcessWorkerClient
    from ..worker.rank_process import Answer

logger = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 60.0
"""Longer than a layer takes."""


class Engine:
    """Thread-safe face of an `EngineCore`. Every action runs on the engine thread, in order of arrival.

    The thread runs the waiting actions, then one step. Later actions wait for the next turn, so the actions of one
    client cannot hold up the steps of others.
    """

    def __init__(
        self,
        core: EngineCore,
        worker: ProcessWorkerClient,
        *,
        on_fatal: Callable[[str], None],
        patience_s: float = PATIENCE_S,
    ) -> None:
        """`on_fatal` is called once, on the engine thread, when no request can be served any more. A worker that
        computes no layer of its batch for `patience_s` stands still.
        """
        self._core = core
        self._worker = worker
        self._on_fatal = on_fatal
        self._patience_s = patience_s
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_open = True
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def core(self) -> EngineCore:
        """For reading counters; anything else goes through `call`."""
        return self._core

    @property
    def fatal_reason(self) -> str | None:
        """Why requests are refused, or None while they are served."""
        failure = self._core.closed
        return None if failure is None else failure.message

    @property
    def standstill(self) -> str | None:
        """Why nothing is computed at present, or None. It may go on."""
        seconds = self._core.seconds_without_layer
        return f"the worker has computed no layer for {seconds:.0f} s" if seconds > self._patience_s else None

    def start(self) -> None:
        self._thread.start()
        self._worker.listen(self._on_message, self._on_death)

    def submit(self, generation: Generation) -> None:
        if not self._post(lambda: self._core.submit(generation)):
            generation.sink(Failure(503, "the server is shutting down"))

    def abort(self, request_id: str) -> None:
        self._post(lambda: self._core.abort(request_id))

    def refuse(self, reason: str) -> None:
        """Answer each open and later request with HTTP 503."""
        self._post(lambda: self._core.close(Failure(503, reason)))

    def call(self, action: Callable[[EngineCore], T]) -> concurrent.futures.Future[T]:
        """Run `action` between two steps of the engine thread; its result or exception arrives in the future."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(action(self._core))
                except Exception as error:
                    future.set_exception(error)

        if not self._post(run):
            future.set_exception(RuntimeError("the engine is stopped"))
        return future

    def close(self, deadline: float | None = None) -> None:
        """Fail open requests, stop the thread, and stop the worker by `deadline`. Idempotent."""
        self.refuse("the server is shutting down")
        self._post(self._request_stop)
        if self._thread.ident is not None:
            self._thread.join()
        self._worker.close(deadline)

    def _post(self, action: Callable[[], None]) -> bool:
        with self._lock:
            if self._is_open:
                self._inbox.put(action)
            return self._is_open

    def _request_stop(self) -> None:
        self._stop = True

    def _on_message(self, rank: int, message: Answer) -> None:
        match message:
            case StepResult():
                self._post(lambda: self._core.on_step_result(message, rank))
            case LayerComputed():
                self._post(self._core.on_layer)
            case TransferNews():
                self._post(lambda: self._core.on_transfer_news(message, rank))
            case WorkerReport():
                self._post(lambda: self._core.on_report(message, rank))

    def on_prefill_answer(self, request_id: str, answer: PrefillAnswer | str) -> None:
        """Called on the thread of the client of prefill servers."""
        self._post(lambda: self._core.on_prefill_answer(request_id, answer))

    def on_storage(self, answer: StorageAnswer) -> None:
        """Called on the thread of the link to the storage."""
        self._post(lambda: self._core.on_storage(answer))

    def _on_death(self, reason: str) -> None:
        self._post(lambda: self._fail_for_good(reason))

    def _fail_for_good(self, reason: str) -> None:
        first = self._core.closed is None
        self._core.close(Failure(503, reason))
        if first:
            self._on_fatal(reason)

    def _run(self) -> None:
        while not self._stop:
            try:
                self._take_turn(self._next_action())
            except BaseException as error:  # the edge of the thread: a bug, or a panic in Rust, ends requests
                logger.exception("the engine failed")
                self._fail_for_good(f"internal error: {error!r}")
        with self._lock:
            self._is_open = False
        while not self._inbox.empty():
            self._inbox.get()()

    def _next_action(self) -> Callable[[], None]:
        try:
            return self._inbox.get(timeout=self._core.seconds_to_next_deadline())
        except queue.Empty:
            return lambda: None  # a request has waited long enough for storage

    def _take_turn(self, first: Callable[[], None]) -> None:
        num_more = self._inbox.qsize()
        first()
        for _ in range(num_more):
            self._inbox.get()()
        self._core.step()
