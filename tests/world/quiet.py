"""A world without lateness and random faults: a test takes each turn by hand and names the faults.

Engine, ranks and clients are those of the world: they check every block and every token.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

from .chance import source
from .clients import Clients, Request
from .memory import Tags
from .ranks import Reports
from .streams import Clock

UIDS = itertools.count()


class Quiet:
    """In place of the world, its faults and their random numbers. The creator sets `host`."""

    weights = 0
    host: Any
    on: frozenset[str] = frozenset()
    """Faults that the world would switch on: none."""
    copies_fail = False
    """True: copies to the host fail."""
    raises_at = 0
    """Number of prompts in the batch when "lost in schedule" strikes."""

    def __init__(self, block_size: int) -> None:
        self.clock, self.tags, self.source = Clock(), Tags(), partial(source, 0)
        self.faults, self.others, self.reports = self, list[Any](), Reports(self)
        self.clients = Clients(self, block_size=block_size)
        self._fails: tuple[str, ...] = ()

    def log(self, *words: object) -> None:
        pass

    def strike(self, name: str, rng: object = None, /) -> bool:
        return name in self._fails or (name == "copy to host fails" and self.copies_fail)

    draw = strike

    def injected(self, name: str) -> None:
        pass

    def randrange(self, number: int) -> int:
        return self.raises_at

    def root(self, task: Any) -> Any:
        return self.weights, task.cache_salt

    @property
    def cache(self) -> Any:
        return self.host.cache_manager

    @property
    def counters(self) -> Any:
        return self.cache.manager.stats().counters

    @property
    def is_idle(self) -> bool:
        """Run until the last request has ended, and check that nothing leaked."""
        self.run_dry()
        self.cache.manager.check_idle()
        return True

    def add(self, name: str, prompt: Any, max_tokens: int = 4, *given: Any, **fields: Any) -> Any:
        """Add a client's request with these `fields`; return the host's request, made with `given`."""
        request = Request(next(UIDS), name, list(prompt), max_tokens)
        vars(request).update(fields)
        self.clients.requests[request.uid] = request
        task = self.host.task(request, *given)
        self.host.manager.add_request(task)
        return task

    def abort(self, name: str) -> None:
        self.clients.aborted.add(name)
        self.host.abort(name)

    def schedule(self, *fails: str) -> Any:
        """Schedule with the faults `fails`; return the batch, also one that was lost."""
        self.host.batch, self._fails = (), fails
        self.host.schedule(self)
        self._fails = ()
        return self.host.batch

    def step(self, *fails: str) -> Any:
        """Deliver reports, schedule a batch, compute it and read its tokens."""
        self.reports.arrive(None)  # type: ignore[arg-type]
        batch = self.schedule(*fails)
        self.compute()
        return batch

    def compute(self) -> None:
        self.clock.advance(0.1)
        self.host.take(None)
        self.host.run(None)
        for rank in self.host.worker.ranks:
            rank.device.run_dry()
        for _ in range(3):
            self.host.take_tokens(None)
        self.cache.check()

    def run_dry(self) -> None:
        for _ in range(5000):
            if not self.clients.requests:
                return
            self.step()
        raise AssertionError(f"no progress: {sorted(self.host.manager.requests)}")
