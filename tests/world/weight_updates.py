"""Weight updates of FastDeploy's legacy API: the API process, the workers' loop, and our thread that answers both.

Actions and their order are FastDeploy's. Its sleeps of some seconds guarantee three things, which are conditions here.
When an update is requested, the worker has left the function that cleared its weights (FastDeploy would hang), and our
thread has seen that they are away. When the update begins, every token sent before has been read.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from fastdeploy_kvcache_v1.fastdeploy_integration.engine.weight_updates import (
    CLEARED,
    CLEARING,
    NORMAL,
    UPDATING,
    WeightUpdates,
)

IDLE_TURNS = 12
"""Most turns of the API between two updates."""


class Shared(list[int]):
    """A number in shared memory. Other processes may run before each read of it."""

    def __init__(self, meanwhile: Callable[[], None]) -> None:
        super().__init__([NORMAL])
        self._meanwhile = meanwhile

    def __getitem__(self, index: Any) -> Any:
        self._meanwhile()
        return super().__getitem__(index)


class Updater:
    """Updates the weights of `host`.

    It uses `cache_manager`, `take`, `run`, `queue.batch`, `worker.drop_rows` and `worker.is_idle` of the host. The
    events `take` and `run` become turns of the workers' loop. A batch waits between `schedule` and the queue.
    """

    def __init__(self, world: Any, host: Any, rng: random.Random) -> None:
        self._world, self._host, self._rng = world, host, rng
        self._patience = rng.choice([4, 1 << 30])
        """Turns after which the API gives up waiting."""
        self._weights, self._tree, self._copies = (SimpleNamespace(value=Shared(self._meanwhile)) for _ in range(3))
        self._heartbeats = SimpleNamespace(value=[0])
        self._is_checking = False
        self._updates = host.cache_manager.updates = WeightUpdates(
            host.cache_manager, weights=self._weights, tree=self._tree, heartbeats=self._heartbeats, copies=self._copies
        )
        self._take, self._run, self._put = host.take, host.run, host._put
        self._processes = self._call(), self._work()
        self.api, self.loop = (partial(self._go_on, process) for process in self._processes)
        self.events = [(10, self.api), (8, self.poll)]
        host.take = host.run = self.loop
        host._put, host.pause = self._put_later, lambda _: None

    @property
    def is_idle(self) -> bool:
        return self._is(NORMAL, self._weights, self._tree)

    def _go_on(self, process: Iterator[None], rng: random.Random) -> None:
        self._rng = rng
        next(process)

    def poll(self, rng: random.Random) -> None:
        self._rng = rng
        self._updates.poll()

    def _put_later(self, *batch: Any) -> None:
        for event in (self.api, self.loop, self.poll) * self._rng.choice([0, 0, 0, 1, 60]):
            event(self._rng)
        self._put(*batch)

    def _meanwhile(self) -> None:
        for process in self._processes if hasattr(self, "_processes") else ():
            while not process.gi_running and self._rng.random() < 0.1:
                next(process)

    def _is(self, value: int, *signals: Any) -> bool:
        return all(signal.value[0] == value for signal in signals)

    # ---- the API process

    def _call(self) -> Iterator[None]:
        while True:
            for _ in range(self._rng.randrange(IDLE_TURNS)):
                yield
            while self._world.faults.are_over and self.is_idle:
                yield
            if not self._world.faults.are_over:
                yield from self._change(NORMAL, CLEARING, CLEARED)
            for _ in range(self._rng.choice([0, 5, IDLE_TURNS])):
                yield
            while self._updates._is_open and not self._is(NORMAL, self._weights):
                yield
            yield from self._change(CLEARED, UPDATING, NORMAL)
            self._host.count["updates"] += self.is_idle

    def _change(self, before: int, asked: int, after: int) -> Iterator[None]:
        """Change the weights, then the tree, unless they are changed already."""
        for signal, others in ((self._weights, [self._copies]), (self._tree, [])):
            if self._is(before, signal):
                while asked == UPDATING and signal is self._weights and self._is_checking:
                    yield
                signal.value[0] = asked
                if not (yield from self._wait([signal, *others], after)):
                    return

    def _wait(self, signals: Sequence[Any], value: int) -> Any:
        for _ in range(self._patience):
            if self._is(value, *signals):
                return True
            yield
        return False

    # ---- the workers' loop

    def _work(self) -> Iterator[None]:
        while True:
            asked = self._weights.value[0]
            yield
            self._heartbeats.value[0] += 1
            yield
            if asked == NORMAL:
                self._take(self._rng)
                yield
                self._run(self._rng)
                yield
                continue
            self._copies.value[0] = asked
            self._is_checking = True
            yield from self._check_weights()
            self._is_checking = False
            yield
            self._host.count["dropped batches"] += self._host.queue.batch is not None
            self._host.queue.batch = None
            yield
            while asked == CLEARING and not (self._is(UPDATING, self._weights) and self._host.worker.is_idle):
                yield

    def _check_weights(self) -> Iterator[None]:
        while self._weights.value[0] not in (NORMAL, CLEARED):
            updating = self._is(UPDATING, self._weights)
            self._copies.value[0] = UPDATING if updating else CLEARING
            self._host.worker.drop_rows()
            yield
            self._world.weights += updating
            self._weights.value[0] = NORMAL if updating else CLEARED
            yield
