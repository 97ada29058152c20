"""All orders of events up to a depth, shortest first: two requests that share a prefix, a few blocks, two ranks.

The cache manager is real. A state is rebuilt by replaying the events that lead to it; states with the same text are the
same state. `WritePolicy.AUTO` is left out, because it remembers its pace.

`python -m tests.world.small_scope --depth N` searches deeper and prints the number of states. A walk goes deeper along
one order, drawn from a seed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import BlockHash, CacheLevel, CopyResult, NoSpace, SwapStep
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.run import DEVICE

PROMPTS = {"a": ("0", "01"), "b": ("0", "02")}
"""Blocks of each request, of one token each. The sampled token behind them is never computed here."""
FAULTS = 1
"""Number of copies that may fail."""
STEPS_AHEAD = 2
"""Steps that the scheduler may be ahead of a rank."""
GARBAGE = "garbage"

Event = tuple[Any, ...]


class Scope(NamedTuple):
    policy: WritePolicy
    device: int
    begun: str = ""
    """Events before the search begins, in the form in which a broken law is reported."""
    host: int = 2
    prompts: Mapping[str, Sequence[str]] = PROMPTS  # never written


class Life:
    """A request from its match on."""

    def __init__(self, name: str, tags: Sequence[str]) -> None:
        self.name, self.tags = name, list(tags)
        self.is_live, self.is_admitted = True, False
        self.allocated = self.told = self.committed = 0
        """Numbers of blocks: in its table, computed once the taken steps have run, and committed."""
        self.rows: dict[int, int] = {}
        """Number of computed blocks, by step."""


class Rank:
    """Contents of its slots, and the steps that it has not run: copies, then (request, its slots, number of reads)."""

    def __init__(self, scope: Scope) -> None:
        self.device, self.host = [""] * scope.device, [""] * scope.host
        self.orders: deque[tuple[SwapStep, list[tuple[Life, list[int], int]]]] = deque()


class World:
    def __init__(self, scope: Scope, path: Sequence[Event]) -> None:
        """Replay the events of `path`."""
        sizes = {"num_device_blocks": scope.device, "num_host_blocks": scope.host, "block_size": 1}
        self.manager = CacheManager(KVCacheConfig(write_policy=scope.policy, eviction_policy="lru", **sizes))
        self.prompts = scope.prompts
        self.ranks = Rank(scope), Rank(scope)
        self.lives: dict[str, Life] = {}
        self.preempted: set[str] = set()
        self.faults_left = FAULTS
        self.backed_up: dict[int, frozenset[int]] = {}
        """Host slots by the step that filled them last, on all ranks as far as is known."""
        self.stored: list[tuple[int, str]] = []
        """Host slots that a store reads, with their content."""
        for event in path:
            self.do(event)

    @property
    def pending(self) -> list[int]:
        """Steps that some rank has not run."""
        return sorted({step.step for rank in self.ranks for step, _ in rank.orders})

    def computed(self, life: Life) -> int:
        return max((end for step, end in life.rows.items() if step not in self.pending), default=0)

    # ---- possible events

    def events(self) -> Iterator[Event]:
        for name in self.prompts:
            life = self.lives.get(name)
            if life is None:
                yield "match", name
                continue
            yield from (("allocate", name, count) for count in range(life.allocated + 1, len(life.tags) + 1))
            if self.computed(life) > life.committed:
                yield "commit", name
            yield from (("end", name, how) for how in ("finish", "preempt"))
            if not self.manager._requests[name].has_committed:
                yield "end", name, "release"
        if all(len(rank.orders) < STEPS_AHEAD for rank in self.ranks):
            yield ("take",)
        for number, rank in enumerate(self.ranks):
            if rank.orders:
                yield "run", number
                step = rank.orders[0][0]
                for copies in (step.swap_out, step.swap_in) if self.faults_left else ():
                    each = [(slot,) for slot in copies.target_slots]
                    for slots in dict.fromkeys([*each, copies.target_slots] if each else []):
                        yield "run", number, copies.target.name, *slots
        if self.stored:
            yield ("end_store",)
        else:
            yield from (("store", step) for step in self.backed_up if step not in self.pending)
        yield from (("reset", how) for how in ("gently", "by_force"))

    def do(self, event: Event) -> None:
        getattr(self, f"_{event[0]}")(*event[1:])
        for rank, (slot, held) in itertools.product(self.ranks, self.stored):
            assert rank.host[slot] == held, "a slot was filled while a store reads it"
            assert slot not in self.manager._host_pool._free, "a slot is free while a store reads it"

    def _match(self, name: str) -> None:
        life = self.lives[name] = Life(name, self.prompts[name])
        blocks = GivenHashes([BlockHash(tag.encode()) for tag in life.tags], len(life.tags) + 1)
        self.manager.match_prefix(name, blocks, resumed=name in self.preempted)
        self.preempted.discard(name)

    def _allocate(self, name: str, count: int) -> None:
        life = self.lives[name]
        found = self.manager.num_cached(name)
        if isinstance(self.manager.allocate(name, max(count, found)), NoSpace):
            return
        if not life.is_admitted:
            life.is_admitted, life.told, life.committed = True, found, found
        life.allocated = max(count, found)

    def _commit(self, name: str) -> None:
        life = self.lives[name]
        life.committed = self.computed(life)
        self.manager.commit(name, life.committed)

    def _end(self, name: str, how: str) -> None:
        getattr(self.manager, how)(name)
        self.lives.pop(name).is_live = False
        self.preempted |= {name} if how == "preempt" else set()

    def _take(self) -> None:
        step, rows = self.manager.take_swap_step(), []
        for life in self.lives.values():
            if life.is_admitted and (life.allocated > life.told or not life.rows):
                rows.append((life, self.manager.block_table(life.name), life.told))
                life.told = life.rows[step.step] = life.allocated
        filled = frozenset(step.swap_out.target_slots)
        kept = {number: slots - filled for number, slots in self.backed_up.items()} | {step.step: filled}
        self.backed_up = {number: slots for number, slots in kept.items() if slots}
        for rank in self.ranks if step.swap_out or step.swap_in or rows else ():
            rank.orders.append((step, rows))

    def _run(self, number: int, tier: str = "", *failing: int) -> None:
        """A rank runs its next step, some copies of which may fail: the engine hears of it, then the pass goes on."""
        self.faults_left -= bool(failing)
        rank = self.ranks[number]
        step, rows = rank.orders.popleft()
        for copies, source, target in ((step.swap_out, rank.device, rank.host), (step.swap_in, rank.host, rank.device)):
            read = [source[slot] for slot in copies.source_slots]
            for slot, held in zip(copies.target_slots, read, strict=True):
                target[slot] = GARBAGE if copies.target.name == tier and slot in failing else held
            if failed := tuple(slot for slot in copies.target_slots if target[slot] == GARBAGE):
                if copies.target is CacheLevel.HOST:
                    self.backed_up.pop(step.step, None)
                result = CopyResult(step.step, copies.source, copies.target, len(failed), 0, 0.0, failed, "failed")
                for name in self.manager.transfer_failed(result):
                    self._end(name, "preempt")
        for life, slots, begin in rows:
            held = [rank.device[slot] for slot in slots[:begin]]
            is_right = held == life.tags[:begin]
            assert is_right or (GARBAGE in held and not life.is_live), f"{life.name} reads {held}"
            for slot, tag in list(zip(slots, life.tags, strict=False))[begin:]:
                rank.device[slot] = tag if is_right else GARBAGE

    def _store(self, step: int) -> None:
        source = self.manager.begin_store("store", step, self.backed_up.pop(step))
        self.stored = [(slot, block.decode()) for block, slot in zip(source.hashes, source.slots, strict=True)]

    def _end_store(self) -> None:
        self.manager.end_store("store")
        self.stored = []

    def _reset(self, how: str) -> None:
        """Weights change: what was computed until now is old, and so is what those compute that go on."""
        self.manager.reset_cache(force=how == "by_force")
        self.backed_up = {}
        for rank in self.ranks:
            rank.device, rank.host = _old(rank.device), _old(rank.host)
        self.stored = [(slot, *_old([held])) for slot, held in self.stored]
        under_way = [life for rank in self.ranks for _, rows in rank.orders for life, _, _ in rows]
        for life in {*self.lives.values(), *under_way}:
            life.tags = _old(life.tags) if life.is_admitted else life.tags
        if how == "by_force":  # nothing runs any more
            self.lives = {}
            for rank in self.ranks:
                rank.orders.clear()

    def drain(self) -> None:
        """Ranks run what they were told, then everything ends: all is idle, and what can be found is what it says."""
        self._run_all()
        for name in list(self.lives):
            self.do(("end", name, "finish"))
        self.do(("take",))
        self._run_all()
        if self.stored:
            self.do(("end_store",))
        self.manager.check_idle()
        stats = self.manager.stats()
        assert stats.host_free_blocks + stats.host_cached_blocks == stats.host_blocks, "host slots leaked"
        for run, rank in itertools.product(self.manager._tree.runs(), self.ranks):
            for slots, memory in ((run.device_slots, rank.device), (run.host_slots, rank.host)):
                held, named = [memory[slot] for slot in slots], [block.decode() for block in run.hashes]
                assert held in ([], named), f"{held} can be found as {named}"

    def _run_all(self) -> None:
        for number, rank in enumerate(self.ranks):
            while rank.orders:
                self.do(("run", number))
        for life in self.lives.values():
            for rank in self.ranks if life.rows else ():
                held = [rank.device[slot] for slot in self.manager.block_table(life.name)[: life.told]]
                assert held == life.tags[: life.told], f"{life.name} holds {held}"


def _old(tags: Sequence[str]) -> list[str]:
    return [tag if tag in ("", GARBAGE) else "old " + tag.removeprefix("old ") for tag in tags]


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


def _parsed(begun: str) -> tuple[Event, ...]:
    events = (tuple(int(word) if word.isdigit() else word for word in each.split()) for each in begun.split(";"))
    return tuple(filter(None, events))


def search(scope: Scope, depth: int) -> tuple[int, int]:
    """How many states there are, and how many events were tried. Raises `AssertionError` with the shortest ones that
    break a law.
    """
    seen, level, events = {""}, [_parsed(scope.begun)], 0
    for _ in range(depth):
        after: list[tuple[Event, ...]] = []
        for path in level:
            for event in list(World(scope, path).events()):
                events, world = events + 1, World(scope, path)
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
    return len(seen), events


FORKS = {stem + tail: (stem, stem + tail) for stem in "01234" for tail in "ab"} | {each: (each,) for each in "xyz"}
FORKED = f"match 0a; allocate 0a 2; match 0b; allocate 0b 2{RUN}; commit 0a; commit 0b{RUN}"
"""Two tails of one prefix go to the host in one step."""
RATE = {"commit": 4, "run": 4, "allocate": 1, "take": 0.5, "end_store": 0.2, "match": 0.1, "store": 0.05, "reset": 5e-3}


def likely(world: World, event: Event) -> float:
    """Return the weight of an event: most requests reach their end, and most stores wait."""
    if event[0] == "end":
        life = world.lives[event[1]]
        return 0.5 if life.committed == len(life.tags) else 0.02
    return RATE[event[0]] / (4 if event[0] == "run" and len(event) > 2 else 1)


def walk(seed: int, num_events: int) -> None:
    """Events at random, with tiers of a few blocks. Two tails of a prefix are copied in one step, and stores begin
    late. Raises as `search`.
    """
    rng = random.Random(seed)
    policy, begun = rng.choice([(THROUGH, ""), (THROUGH, FORKED), (THROUGH, FORKED), (BACK, ""), (SELECTIVE, "")])
    scope = Scope(policy, rng.randrange(5, 9), begun, rng.randrange(3, 7), FORKS)
    world, done = World(scope, _parsed(begun)), []
    world.faults_left = 3
    try:
        for _ in range(num_events):
            found = list(world.events())
            event = rng.choices(found, [likely(world, each) for each in found])[0]
            done.append(" ".join(map(str, event)))
            world.do(event)
            world.manager.check()
        world.drain()
    except Exception as error:
        raise AssertionError(f"{error!r} in {scope} after: {'; '.join(done)}") from error


# ---- the text of a state: steps are named by their place


def text(world: World) -> str:
    manager, pending = world.manager, world.pending
    residency, requests, told = manager._residency, manager._requests, manager._tiering.told
    tree = sorted(manager._tree.runs(), key=lambda run: run.last_hash)
    number = {run: at for at, run in enumerate([*tree, *residency.detached_runs()])}
    counts_hits = bool(manager._tiering._policy.copied_after_hits)
    parts: list[Any] = [counts_hits and sorted(world.preempted), world.faults_left]
    for run in number:
        places = [run.slots(DEVICE, run.start, run.end) if run.on_device or run.open else [], run.host_slots]
        state = [run.on_device, run.open, run.pins, run.hits, run.detached, number.get(run.parent)]
        joins = [run.ends_its_cells, run.parent is not None and run.parent.cells is run.cells]
        parts.append([[block.decode() for block in run.hashes], places, state, joins])
    queues = (*residency._device_queues(), *residency._host_queues())
    parts += [[[number[place.run] for place in queue] for queue in queues], [number[run] for run in residency._open]]
    for name, life in sorted(world.lives.items()):
        state, open_step = requests[name], manager._tiering.step
        tokens = state.step == open_step, state.num_tokens, state.num_closed_tokens, state.num_cached
        rows = [(pending.index(step), end) for step, end in life.rows.items() if step in pending]
        flags = name in requests._admitted, state.may_cache, counts_hits and state.resumed
        ours = life.is_admitted, life.allocated, life.told, life.committed, world.computed(life), life.tags[0], rows
        own = state.tail, state.duplicates, state.has_committed, bool(life.rows)
        parts.append([name, number.get(state.leaf), own, tokens, flags, ours])
    for step in sorted({*pending, *world.backed_up}):
        parts_of = [copy.parts() for copy in told.of(step) or ()]
        found = [[number[run], first - run.start, last - run.start] for each in parts_of for run, first, last in each]
        parts.append([step in pending, found, sorted(world.backed_up.get(step, ()))])
    for rank in world.ranks:
        for step, rows in rank.orders:
            written = [(life.name, life.is_live, *row) for life, *row in rows]
            parts.append([step.swap_out, step.swap_in, pending.index(step.step), written])
        parts.append([rank.device, rank.host])
    return repr([*parts, manager._device_pool._free, manager._host_pool._free, len(world.stored)])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world.small_scope")
    parser.add_argument("--depth", type=int, required=True)
    depth = parser.parse_args().depth
    for name, (scope, _) in SCOPES.items():
        begin = time.process_time()
        states, events = search(scope, depth)
        print(f"{states} states, {events} events, {time.process_time() - begin:.1f} s: {name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
