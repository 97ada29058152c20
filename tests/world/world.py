"""One deterministic world: actors take turns as the tickets say, and laws are looked at after each."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from fastdeploy_kvcache_v1.errors import TransferError

from .chance import FAULTS, Faults, source
from .clients import Clients
from .memory import Tags, WrongError
from .scenarios import SCENARIOS
from .streams import Clock

TURN_S = 0.05
MOST_TURNS = 6000


class Run(NamedTuple):
    """All that a run depends on."""

    scenario: str
    seed: int
    tickets: Sequence[int]
    off: frozenset[str] = frozenset()
    sizes: Mapping[str, int] = {}  # never written
    check_every: int = 10


class World:
    def __init__(self, run: Run) -> None:
        self.run = run
        self.source = partial(source, f"{run.scenario} {run.seed}")
        rng = self.source("faults")
        self.faults = Faults({name for name in FAULTS if rng.random() < 0.5} - run.off)
        self.clock, self.tags = Clock(), Tags()
        self.weights = 0
        self.trace: deque[str] = deque(maxlen=None if run.check_every == 1 else 40)
        self.sizes: dict[str, int] = {}
        self.ticket = -1
        self.others: list[Any] = []
        """Further actors: `events`, `is_idle`."""
        self.last_checks: list[Any] = []
        """When all is idle."""
        self.free_stuck: Any = lambda: False
        """Whether it could, where nothing moves."""
        self.clients: Clients
        self.host: Any
        SCENARIOS[run.scenario](self, self.source("scenario"))

    def log(self, *words: object) -> None:
        self.trace.append(f"{self.ticket}: {' '.join(map(str, words))}")

    def size(self, name: str, drawn: int, least: int = 1) -> int:
        """Of the scenario, unless the run says another one, which is at least `least`."""
        self.sizes[name] = max(least, self.run.sizes.get(name, drawn))
        return self.sizes[name]

    def root(self, task: Any) -> Hashable:
        """Whose blocks a request shares."""
        return self.weights, task.cache_salt

    def events(self) -> list[tuple[float, Any]]:
        """Weights and events. A ticket chooses one without a look at what is possible."""
        return [
            (14, self.clients.add),
            (1, self.clients.abort),
            *self.host.events,
            *(event for other in self.others for event in other.events),
        ]

    def go(self) -> None:
        """Raises what is wrong."""
        events = self.events()
        weights = [weight for weight, _ in events]
        try:
            for number, ticket in enumerate(self.run.tickets):
                self.ticket, rng = ticket, self.source(ticket)
                event = rng.choices(events, weights)[0][1]
                self.clock.advance(TURN_S * rng.random())
                event(rng)
                if number % self.run.check_every == 0:
                    self.host.check()
            self.settle()
        except TransferError:
            # A block whose copy to the host failed was asked for before the engine heard of it: the worker ends.
            if not self.faults.count["copy to host fails"]:
                raise
            self.host.count["the worker ends"] += 1

    def settle(self) -> None:
        """Nothing goes wrong any more, and everything ends."""
        self.faults.are_over = True
        by_itself = [event for weight, event in self.events() if weight >= 5 and event != self.clients.add]
        before, since, idle = None, 0, 0
        for turn in range(MOST_TURNS):
            self.ticket = -1 - turn
            rng = self.source(f"turn {turn}")
            self.clock.advance(TURN_S)
            for event in by_itself:
                event(rng)
            is_idle = all(actor.is_idle for actor in (self.host, self.host.worker, *self.others))
            idle = idle + 1 if is_idle else 0
            if idle == 4:  # a step behind the last one tells the store
                break
            since = since + 1 if self.host.progress == before else 0
            before = self.host.progress
            if since > 300:
                if not self.free_stuck():
                    raise WrongError(f"nothing moves any more: {self.describe()}")
                since = 0
        else:
            raise WrongError(f"it does not end: {self.describe()}")
        self.host.check()
        for check in (self.host.check_idle, *self.last_checks):
            check()

    def describe(self) -> str:
        requests = self.clients.requests.values()
        lives = [f"{each.request_id}: {len(each.output)} of {each.max_tokens}" for each in requests]
        return f"live {lives} pausing {self.host.pausing!r}"

    def outcome(self) -> tuple[Any, ...]:
        """What two runs of one seed have in common."""
        counts = self.clients.num_ended, self.host.count, self.faults.count
        return tuple(sorted(each.items()) for each in counts)
