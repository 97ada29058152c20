"""One deterministic world: each ticket chooses an actor's event, and laws are checked after the events."""

from __future__ import annotations

import logging
import shlex
import traceback
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
    """Everything that a run depends on."""

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
        self.faults = Faults({name for name in FAULTS if rng.random() < 0.5} - run.off, self.log)
        self.clock, self.tags = Clock(), Tags()
        self.weights = 0
        self.trace: deque[str] = deque(maxlen=None if run.check_every == 1 else 40)
        self.sizes: dict[str, int] = {}
        self.ticket = -1
        self.num_checks = 0
        self.others: list[Any] = []
        """Further actors, each with `events` and `is_idle`."""
        self.last_checks: list[Any] = []
        """Called when everything is idle."""
        self.free_stuck: Any = lambda: False
        """Ends a request that the host itself leaves stuck. True if it did."""
        self.clients: Clients
        self.host: Any
        SCENARIOS[run.scenario](self, self.source("scenario"))

    def log(self, *words: object) -> None:
        """Negative tickets are the turns of `settle`."""
        self.trace.append(f"{self.ticket}: {' '.join(map(str, words))}")

    def size(self, name: str, drawn: int, least: int = 1) -> int:
        """The size that the scenario has drawn, or the one of the run, which is raised to `least`."""
        self.sizes[name] = max(least, self.run.sizes.get(name, drawn))
        return self.sizes[name]

    def root(self, task: Any) -> Hashable:
        """Requests share blocks only under an equal root."""
        return self.weights, task.cache_salt

    def events(self) -> list[tuple[float, Any]]:
        """Weights and events. A ticket draws an event even if that event can do nothing now."""
        return [
            (14, self.clients.add),
            (1, self.clients.abort),
            *self.host.events,
            *(event for other in self.others for event in other.events),
        ]

    def go(self) -> None:
        """Raise the first broken law."""
        events = self.events()
        weights = [weight for weight, _ in events]
        try:
            for number, ticket in enumerate(self.run.tickets):
                self.ticket, rng = ticket, self.source(ticket)
                event = rng.choices(events, weights)[0][1]
                self.clock.advance(TURN_S * rng.random())
                event(rng)
                if number % self.run.check_every == 0:
                    self.check()
            self.settle()
        except TransferError:
            # A request used a block whose copy to the host failed before the engine knew of it: the worker ends.
            if not self.faults.count["copy to host fails"]:
                raise
            self.host.count["the worker ends"] += 1

    def check(self) -> None:
        self.num_checks += 1
        self.host.check()

    def settle(self) -> None:
        """Run without new requests and faults until everything has ended. Raise `WrongError` if something does not."""
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
            if idle == 4:  # the store learns of the last step with one step more
                break
            since = since + 1 if self.host.progress == before else 0
            before = self.host.progress
            if since > 300:
                if not self.free_stuck():
                    raise WrongError(f"nothing moves any more: {self.describe()}")
                since = 0
        else:
            raise WrongError(f"it does not end: {self.describe()}")
        self.check()
        for check in (self.host.check_idle, *self.last_checks):
            check()

    def describe(self) -> str:
        requests = self.clients.requests.values()
        lives = [f"{each.request_id}: {len(each.output)} of {each.max_tokens}" for each in requests]
        return f"live {lives} pausing {self.host.pausing!r}"

    def outcome(self) -> tuple[Any, ...]:
        """Counts, which are equal in two runs of one seed: requests by end, events of the host, faults, checks."""
        checks = {"tokens": self.clients.num_tokens, "positions": self.tags.num_compared, "checks": self.num_checks}
        counts = self.clients.num_ended, self.host.count, self.faults.count, checks
        return tuple(sorted(each.items()) for each in counts)


# ---- runs that may fail: the command that replays one, and the smallest one that fails in the same way


KEPT = [
    Run("fastdeploy26 attention_store", 37, range(500)),
    Run("fastdeploy26 attention_store", 140, range(500)),
    Run("fastdeploy26", 33, range(500), sizes={"device": 16}),
    Run("embedded file", 40, range(500), sizes={"device": 16, "host": 8}),
    Run("embedded attention_store", 99, range(500)),
]
"""Runs that found a defect once."""


class Result(NamedTuple):
    error: str | None
    kind: str
    """Exception and function that raised it: another function is another defect."""
    trace: list[str]
    outcome: Any


def try_run(run: Run) -> Result:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    world = None
    try:
        world = World(run)
        world.go()
        return Result(None, "", list(world.trace), world.outcome())
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        kind = f"{type(error).__name__} in {last.name}"
        at = f" (ticket {world.ticket})" if world is not None else ""
        return Result(f"{kind}: {error}{at}", kind, list(world.trace) if world is not None else [], None)
    finally:
        logging.disable(before)


def line(run: Run) -> str:
    """Return the command that replays `run`."""
    parts, events = [f"python -m tests.world {shlex.quote(run.scenario)} --seed {run.seed}"], len(run.tickets)
    whole = list(run.tickets) == list(range(events))
    parts += [f"--events {events}"] if whole else [f"--tickets {','.join(map(str, run.tickets))}"]
    parts += [f"--off '{','.join(sorted(run.off))}'"] if run.off else []
    parts += [f"--size {name}={size}" for name, size in sorted(run.sizes.items())]
    return " ".join([*parts, "--check-every 1"])


def shrink(run: Run) -> Run:
    """Return the smallest run that fails like `run`: delta debugging over faults and tickets, then over sizes."""
    kind = try_run(run).kind

    def fails(candidate: Run) -> bool:
        return try_run(candidate).kind == kind

    for name in FAULTS:
        if fails(candidate := run._replace(off=run.off | {name})):
            run = candidate
    run = _fewer_tickets(run, fails)
    for name, size in World(run).sizes.items():
        least = World(run._replace(sizes={name: 0})).sizes[name]
        while size > least and fails(candidate := run._replace(sizes={**run.sizes, name: max(least, size // 2)})):
            run, size = candidate, max(least, size // 2)
    return _fewer_tickets(run, fails)


def _fewer_tickets(run: Run, fails: Any) -> Run:
    tickets, parts = list(run.tickets), 2
    while len(tickets) >= 2 and parts <= len(tickets):
        size = -(-len(tickets) // parts)
        for first in range(0, len(tickets), size):
            if fails(candidate := run._replace(tickets=tickets[:first] + tickets[first + size :])):
                tickets, run, parts = list(candidate.tickets), candidate, max(parts - 1, 2)
                break
        else:
            if parts == len(tickets):
                break
            parts = min(2 * parts, len(tickets))
    return run
