"""Two requests that share a prefix, a few blocks, two ranks: all orders of events up to a depth, shortest first.

Real is the cache manager. A state is rebuilt by replaying the events that lead to it; two states with one canonical
text are the same. `WritePolicy.AUTO` is left out: it remembers its pace.

`python -m tests.world.small_scope --depth N` looks further, and prints how many states there are.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.scheduler.run import DEVICE

from .small_world import Event, Rank, Scope, World

COMPUTED = "match a; allocate a 2; take; run 0; run 1; commit a"
RUN = "; take; run 0; run 1"
B = "; match b; allocate b 2"
STORED = f"{COMPUTED}{RUN}; store 1"
EVICTED = f"{COMPUTED}; end a finish{B}"
LOADED = f"{EVICTED}{RUN}; commit b; end b finish; match a; allocate a 2"
BOTH_GROW = f"match a; allocate a 1{RUN}; commit a{B}; allocate a 2{RUN}"
THROUGH, BACK, SELECTIVE = WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_BACK, WritePolicy.WRITE_THROUGH_SELECTIVE

SCOPES = {
    # how it begins: scope (policy, device blocks, first events), depth of the first tier
    "empty": (Scope(THROUGH, 3), 7),
    "empty, writes back": (Scope(BACK, 2), 7),
    "computed": (Scope(THROUGH, 3, COMPUTED), 4),
    "stored": (Scope(THROUGH, 3, STORED), 4),
    "stored, host full": (Scope(THROUGH, 3, f"{STORED}; end a finish{B}{RUN}"), 3),
    "both grow": (Scope(THROUGH, 3, BOTH_GROW), 4),
    "evicted": (Scope(BACK, 2, EVICTED), 5),
    "loaded": (Scope(BACK, 2, LOADED), 4),
    "hit": (Scope(SELECTIVE, 3, f"{COMPUTED}; end a preempt; match a"), 4),
}


class Found(NamedTuple):
    states: int
    events: int
    is_whole: bool
    """Every state that there is was seen."""


def search(scope: Scope, depth: int) -> Found:
    """Raises `AssertionError` with the shortest events that break a law."""
    begun = [tuple(int(word) if word.isdigit() else word for word in each.split()) for each in scope.begun.split(";")]
    seen, level, events = {""}, [tuple(filter(None, begun))], 0
    for _ in range(depth):
        after: list[tuple[Event, ...]] = []
        for path in level:
            for event in _replayed(scope, path).events():
                events += 1
                world = _replayed(scope, path)
                try:
                    world.do(event)
                    world.manager.check()
                    if (state := text(world)) not in seen:
                        seen.add(state)
                        after.append((*path, event))
                        world.drain()
                except Exception as error:
                    words = [" ".join(map(str, each)) for each in (*path, event)]
                    raise AssertionError(f"{error!r} after: {'; '.join(words)}") from error
        level = after
    return Found(len(seen), events, not level)


def _replayed(scope: Scope, path: Sequence[Event]) -> World:
    world = World(scope)
    for event in path:
        world.do(event)
    return world


# ---- the canonical text of a state: slots are named by their first mention, steps by their place, ranks in any order


def text(world: World) -> str:
    manager, tags, pending = world.manager, world.tags, world.pending
    residency, requests, told = manager._residency, manager._requests, manager._tiering.told
    tree = sorted(manager._tree.runs(), key=lambda run: tags[run.last_hash])
    number = {run: at for at, run in enumerate([*tree, *residency.detached_runs()])}
    counts_hits = bool(manager._tiering._policy.hits_that_count)
    parts: list[Any] = [counts_hits and sorted(world.preempted), world.faults_left]
    for run in number:
        places = [run.slots(DEVICE, run.start, run.end) if run.on_device or run.open else [], run.host_slots]
        state = [run.on_device, run.open, run.pins, run.hits, run.detached, run.is_read, number.get(run.parent)]
        joins = [run.ends_its_cells, run.parent is not None and run.parent.cells is run.cells]
        blocks = [tags[block] for block in run.hashes]
        parts.append([blocks, _slots("d", places[0]), _slots("h", places[1]), state, joins])
    queues = (*residency._device_queues(), *residency._host_queues())
    parts += [[[number[place.run] for place in queue] for queue in queues], [number[run] for run in residency._open]]
    for name, life in sorted(world.lives.items()):
        state, open_step = requests[name], requests.step
        own = _slots("d", state.tail), list(state.duplicates), _slots("d", list(state.duplicates.values()))
        tokens = state.step == open_step, state.num_tokens, state.num_closed_tokens, state.num_cached
        rows = [(pending.index(step), end) for step, end in life.rows.items() if step in pending]
        flags = name in requests._admitted, state.may_cache, counts_hits and state.resumed
        ours = life.is_admitted, life.allocated, life.told, life.committed, world.computed(life), life.tags[0], rows
        parts.append([name, number.get(state.leaf), own, tokens, flags, state.has_committed, bool(life.rows), ours])
    for step in sorted({*pending, *world.backed_up}):
        parts_of = [copy.parts() for copy in told.of(step) or ()]
        found = [[number[run], first - run.start, last - run.start] for each in parts_of for run, first, last in each]
        parts.append([step in pending, found, _slots("h", sorted(world.backed_up.get(step, ())))])
    parts += [_slots("d", manager._device_pool._free), _slots("h", manager._host_pool._free), len(world.stored)]
    first: dict[str, str] = {}
    whole = _renamed(repr(parts), first)
    return whole + "".join(sorted(_rank_text(rank, pending, first) for rank in world.ranks))


def _rank_text(rank: Rank, pending: Sequence[int], first: dict[str, str]) -> str:
    parts: list[Any] = []
    for step, rows in rank.orders:
        for copies, names in ((step.evict, "dh"), (step.swap_in, "hd")):
            parts.append([_slots(names[0], copies.source_slots), _slots(names[1], copies.target_slots)])
        written = [(each.name, each.is_live, _slots("d", table), begin) for each, table, begin in rows]
        parts.append([pending.index(step.step), written])
    slots = [*_slots("d", range(len(rank.device))), *_slots("h", range(len(rank.host)))]
    memory = zip(slots, [*rank.device, *rank.host], strict=True)
    return _renamed(repr(parts), first) + repr(sorted((first[slot], tag) for slot, tag in memory))


def _slots(tier: str, slots: Sequence[int]) -> list[str]:
    return [f"{tier}{slot}" for slot in slots]


def _renamed(whole: str, first: dict[str, str]) -> str:
    return re.sub(r"\b[dh]\d+", lambda found: first.setdefault(found[0], f"{found[0][0]}:{len(first)}"), whole)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world.small_scope")
    parser.add_argument("--depth", type=int, required=True)
    depth = parser.parse_args().depth
    for name, (scope, _) in SCOPES.items():
        begin = time.process_time()
        found = search(scope, depth)
        print(f"{found.states} states, {found.events} events, {time.process_time() - begin:.1f} s: {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
