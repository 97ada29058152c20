"""StorageLink: the engine's end. Commands go to the agents of all ranks; questions are asked by a lane of its own."""

from __future__ import annotations

import contextlib
import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from ...contract.messages import BlockHash
from ..base import StorageBackend, StoreKey
from ..lane import Lane
from ..messages import CommitDone, LaneConnected, QueryDone, TouchDone, UseNamespace
from ..namespace import Namespace, block_key, commit_key
from ..seal import TRAILER_BYTES, seal

__all__ = ["StorageLink"]

logger = logging.getLogger(__name__)

POLL_MS = 100
STOP_TIMEOUT_S = 2.0
LANES_PER_AGENT = 2


@dataclass(frozen=True)
class _Query:
    query_id: str
    hashes: tuple[BlockHash, ...]

    def failed(self, error: str) -> QueryDone:
        return QueryDone(self.query_id, 0, error=error)


@dataclass(frozen=True)
class _Commit:
    store_id: str
    hashes: tuple[BlockHash, ...]

    def failed(self, error: str) -> CommitDone:
        return CommitDone(self.store_id, error)


@dataclass(frozen=True)
class _Touch:
    touch_id: str
    hashes: tuple[BlockHash, ...]

    def failed(self, error: str) -> TouchDone:
        return TouchDone(self.touch_id, 0, error)


class StorageLink:
    """ZeroMQ sockets, one address for each rank's commands and one for all answers."""

    def __init__(
        self,
        commands_addresses: Sequence[str],
        results_address: str,
        *,
        open_backend: Callable[[Namespace], StorageBackend] | None,
        lanes_per_agent: int = LANES_PER_AGENT,
    ) -> None:
        """Binds at once. Without `open_backend` questions are commands for the agents, and `query`, `commit` and
        `touch` are not to be called. Raises `zmq.ZMQError`.
        """
        self.num_ranks = len(commands_addresses)
        self._context = zmq.Context()
        self._results = self._context.socket(zmq.PULL)
        self._commands = [self._context.socket(zmq.PUSH) for _ in commands_addresses]
        try:
            self._results.bind(results_address)
            for socket, address in zip(self._commands, commands_addresses, strict=True):
                socket.set(zmq.SNDHWM, 0)  # no limit: the tier bounds what is under way
                socket.bind(address)
        except zmq.ZMQError:
            self._context.destroy(linger=0)
            raise
        self._num_missing = lanes_per_agent * self.num_ranks
        """Lanes that have not connected yet."""
        self._stop = threading.Event()
        self._receiver: threading.Thread | None = None
        self._lane: Lane | None = None
        if open_backend is not None:
            self._num_missing += 1
            self._lane = Lane(
                "kv-storage-query",
                open_backend=open_backend,
                work=self._ask,
                on_error=lambda command, error: command.failed(error),
                results=(self._context, results_address),
            )

    def is_connected(self, timeout_ms: int) -> bool:
        """All agents and lanes have connected, so the names of the sockets are not needed any more. Before `listen`."""
        while self._num_missing > 0:
            if not self._results.poll(timeout_ms):
                return False
            assert isinstance(pickle.loads(self._results.recv()), LaneConnected), "nothing was asked yet"
            self._num_missing -= 1
        return self._can_send(timeout_ms)

    @property
    def is_ready(self) -> bool:
        """As `is_connected`, at once, while the link listens. What is sent before is lost."""
        return self._num_missing <= 0 and self._can_send(0)

    def _can_send(self, timeout_ms: int) -> bool:
        return all(socket.poll(timeout_ms, zmq.POLLOUT) for socket in self._commands)

    def listen(self, on_answer: Callable[[Any], None]) -> None:
        """Deliver answers, on a thread of the link. Once."""
        self._receiver = threading.Thread(target=self._receive, args=(on_answer,), name="kv-storage", daemon=True)
        self._receiver.start()

    def query(self, query_id: str, hashes: Sequence[BlockHash]) -> None:
        self._ask_later(_Query(query_id, tuple(hashes)))

    def send(self, command: object) -> None:
        if isinstance(command, UseNamespace) and self._lane is not None:
            self._lane.do(command)
        message = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        for socket in self._commands:
            with contextlib.suppress(zmq.Again):  # nobody is there any more: its death is told elsewhere
                socket.send(message, zmq.NOBLOCK)

    def commit(self, store_id: str, hashes: Sequence[BlockHash]) -> None:
        self._ask_later(_Commit(store_id, tuple(hashes)))

    def touch(self, touch_id: str, hashes: Sequence[BlockHash]) -> None:
        self._ask_later(_Touch(touch_id, tuple(hashes)))

    def close(self) -> None:
        """Nothing is delivered afterwards. May be called again."""
        self._stop.set()
        if self._receiver is not None:
            self._receiver.join()
        if self._lane is None or self._lane.close(time.monotonic() + STOP_TIMEOUT_S):
            self._context.destroy(linger=0)

    def _ask_later(self, command: _Query | _Commit | _Touch) -> None:
        assert self._lane is not None, "this link was made without a connection of its own"
        self._lane.do(command)

    def _ask(self, backend: StorageBackend, command: _Query | _Commit | _Touch) -> QueryDone | CommitDone | TouchDone:
        start = time.perf_counter()
        if isinstance(command, _Touch):
            backend.touch([key for block in command.hashes for key in self._all_keys(block)])
        # With one rank its part is the block: it is stored as a whole or not at all.
        keys = [commit_key(block) if self.num_ranks > 1 else block_key(block, 0) for block in command.hashes]
        if isinstance(command, _Touch):
            return TouchDone(command.touch_id, backend.count_stored(keys))
        if isinstance(command, _Query):
            stored = backend.count_stored(keys)
            return QueryDone(command.query_id, stored, time.perf_counter() - start)
        markers = [memoryview(bytearray(TRAILER_BYTES)) for _ in keys]
        for key, marker in zip(keys, markers, strict=True):
            seal(marker, key, namespace=backend.namespace_digest)
        backend.put(keys, markers)
        return CommitDone(command.store_id)

    def _all_keys(self, block: BlockHash) -> list[StoreKey]:
        if self.num_ranks == 1:
            return [block_key(block, 0)]
        return [commit_key(block), *(block_key(block, rank) for rank in range(self.num_ranks))]

    def _receive(self, on_answer: Callable[[Any], None]) -> None:
        while not self._stop.is_set():
            if self._results.poll(POLL_MS):
                answer = pickle.loads(self._results.recv())
                if isinstance(answer, LaneConnected):
                    self._num_missing -= 1
                else:
                    on_answer(answer)
