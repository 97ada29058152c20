"""Runs that may fail: the line that replays one, and the smallest one that fails in the same way."""

from __future__ import annotations

import logging
import shlex
import traceback
from typing import Any, NamedTuple

from .chance import FAULTS
from .world import Run, World

KEPT = [
    # scenario, seed, events, sizes: found something once
    Run("fastdeploy26 attention_store", 37, range(500)),
    Run("fastdeploy26", 33, range(500), sizes={"device": 16}),
    Run("embedded file", 40, range(500), sizes={"device": 16, "host": 8}),
    Run("embedded attention_store", 99, range(500)),
]


class Result(NamedTuple):
    error: str | None
    kind: str
    """Where it was raised: another place is another defect."""
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
    """The command that replays it."""
    parts, events = [f"python -m tests.world {shlex.quote(run.scenario)} --seed {run.seed}"], len(run.tickets)
    whole = list(run.tickets) == list(range(events))
    parts += [f"--events {events}"] if whole else [f"--tickets {','.join(map(str, run.tickets))}"]
    parts += [f"--off '{','.join(sorted(run.off))}'"] if run.off else []
    parts += [f"--size {name}={size}" for name, size in sorted(run.sizes.items())]
    return " ".join([*parts, "--check-every 1"])


def shrink(run: Run) -> Run:
    """Delta debugging over tickets and faults, then sizes."""
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
