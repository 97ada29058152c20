"""The adversary's shapes: a long conversation, a long run, many children, a deep chain.

What an operation costs is counted in function calls and in bytes allocated meanwhile, never in time: a loop over
blocks or runs shows in the first number, a copy of a long list in the second.
"""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections.abc import Callable
from types import FrameType
from typing import NamedTuple

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import Allocation, BlockHash, CacheLevel, CopyResult, NoSpace
from fastdeploy_kvcache_v1.contract.sessions import LAST_TURN, UNTOLD, SessionHint, session_hint
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.policies.eviction import EvictionOrder
from fastdeploy_kvcache_v1.scheduler.reuse.history import TICKS_PER_SECOND
from fastdeploy_kvcache_v1.scheduler.run import Run

from .scenario import manager


class Work(NamedTuple):
    calls: int
    bytes: int

    def is_like(self, other: Work) -> bool:
        """At most twice the `other`, beside small change."""
        return self.calls <= 2 * other.calls + 10 and self.bytes <= 2 * other.bytes + 2000


def work(operation: Callable[[], object]) -> Work:
    calls = 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    gc.disable()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    tracemalloc.reset_peak()
    sys.setprofile(count)
    try:
        operation()
    finally:
        sys.setprofile(None)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        gc.enable()
    return Work(calls, peak - before)


def blocks(count: int, tag: int = 0) -> list[BlockHash]:
    return [BlockHash(tag.to_bytes(8, "big") + number.to_bytes(8, "big")) for number in range(count)]


def begin(
    cache: CacheManager, name: str, hashes: list[BlockHash], session: SessionHint = UNTOLD, *, compute: bool = True
) -> None:
    cache.match_prefix(name, GivenHashes(hashes, len(hashes) + 1, session))
    assert isinstance(cache.allocate(name, len(hashes)), Allocation)
    cache.take_swap_step()
    if compute:
        cache.commit(name, len(hashes))


def play(cache: CacheManager, name: str, hashes: list[BlockHash], session: SessionHint = UNTOLD) -> None:
    begin(cache, name, hashes, session)
    cache.finish(name)


@pytest.mark.parametrize(("policy", "host"), [("write_back", 0), *((policy.value, 3000) for policy in WritePolicy)])
@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_a_turn_costs_the_same_however_many_came_before(policy: str, host: int, eviction: str) -> None:
    cache = manager(3000, host, policy, max_queued_events=0, eviction_policy=eviction)
    hashes = blocks(2000)
    costs = {}
    for turn in range(1, 1001):
        said = GivenHashes(hashes[: 2 * turn], 2 * turn + 1)

        def one_turn(said: GivenHashes = said) -> None:
            begin(cache, "turn", said.hashes)  # type: ignore[arg-type]
            cache.finish("turn")

        costs[turn] = work(one_turn) if turn in (100, 1000) else one_turn()
    # The copy of the turn's own hashes in `begin` is the test's: 8 bytes a block.
    assert costs[1000].is_like(costs[100]._replace(bytes=costs[100].bytes + 8 * 1000))
    hits_told_apart = cache._tiering._policy.copied_after_hits or 0
    assert sum(1 for _ in cache._tree.runs()) <= max(2, 1 + hits_told_apart)
    cache.check()


# ---- one operation, on a small and on a large one of its adversary's shape

Shaped = tuple[CacheManager, Callable[[], object]]
"""The shape, and the operation whose cost must not grow with it."""


def waiting_head(turns: int) -> Shaped:
    cache, hashes = manager(2 * turns + 2, 3000, "write_through", max_queued_events=0), blocks(2 * turns)
    for turn in range(1, turns + 1):
        play(cache, "turn", hashes[: 2 * turn])
    waiting = GivenHashes([*hashes, *blocks(10, 1)], 2 * turns + 11)

    def retry() -> None:
        cache.match_prefix("head", waiting)
        assert isinstance(cache.allocate("head", waiting.num_tokens), NoSpace)
        cache.release("head")

    return cache, retry


def long_run(length: int) -> Shaped:
    cache = manager(length, max_queued_events=0)
    play(cache, "long", blocks(length))
    play(cache, "first", blocks(1, 1))
    return cache, lambda: play(cache, "other", blocks(1, 2))


def long_request(length: int) -> Shaped:
    cache = manager(length + 10, max_queued_events=0)
    sequence = GivenHashes(blocks(length + 10), length + 1)
    cache.match_prefix("r", sequence)
    cache.allocate("r", length)
    cache.take_swap_step()
    cache.commit("r", length)

    def grow() -> None:
        cache.allocate("r", sequence.num_tokens)
        sequence.num_tokens += 1
        cache.take_swap_step()
        cache.commit("r", sequence.num_tokens - 1)

    grow()  # the list may have to move once to grow
    return cache, grow


def many_children(children: int) -> Shaped:
    cache, stem = manager(4, children + 16, max_queued_events=0), blocks(1)
    for number in range(children):
        play(cache, str(number), stem + blocks(1, 1 + number))
    play(cache, "flush", blocks(4, 10_000))
    play(cache, "stem", stem)
    return cache, lambda: play(cache, "flush again", blocks(4, 20_000))


def many_others(others: int) -> Shaped:
    cache = manager(others + 10, others + 10, "write_through", max_queued_events=0)
    for number in range(others):
        play(cache, "other", blocks(1, 1 + number))
    begin(cache, "r", blocks(4))
    step = cache.take_swap_step()
    slots = step.swap_out.target_slots[-4:]
    failed = CopyResult(step.step, CacheLevel.DEVICE, CacheLevel.HOST, 4, 0, 0.0, slots, "injected")
    return cache, lambda: cache.transfer_failed(failed)


def stored_piece(length: int) -> Shaped:
    cache = manager(length + 8, length + 8, "write_through", max_queued_events=0)
    play(cache, "r", blocks(length))
    step = cache.take_swap_step()
    wanted = frozenset(step.swap_out.target_slots[32:64])
    cache.begin_store("first", step.step, frozenset(step.swap_out.target_slots[:32]))
    return cache, lambda: cache.begin_store("s", step.step, wanted)


def stored_one_turn_late(length: int) -> Shaped:
    """The blocks of the last turn but one, which have been joined with what is above them."""
    cache, hashes = manager(length + 16, length + 16, "write_through", max_queued_events=0), blocks(length + 16)
    for end in (length, length + 8, length + 16):
        play(cache, "turn", hashes[:end])
        step = cache.take_swap_step()
        if end == length + 8:
            late = step
    assert max(run.length for run in cache._tree.runs()) >= length + 8
    return cache, lambda: cache.begin_store("s", late.step, frozenset(late.swap_out.target_slots))


def piece_on_the_device(length: int) -> Shaped:
    cache, hashes = manager(length + 8, max_queued_events=0), blocks(length)
    play(cache, "r", hashes)
    return cache, lambda: cache.begin_device_store("s", hashes, 128, most=32)


def sessions(count: int, return_in_s: float | None = None) -> CacheManager:
    """As many as there are blocks, each with one, while learned rates rule."""
    cache = manager(count, max_queued_events=0, eviction_policy="adaptive")
    cache._history.judge.trusts = True
    for number in range(count):
        play(cache, "session", blocks(1, number), session_hint(str(number), return_in_s=return_in_s))
    return cache


def evicting(cache: CacheManager) -> Shaped:
    return cache, lambda: play(cache, "new", blocks(1, 1 << 20))


def session_told_later(count: int) -> Shaped:
    cache = sessions(count)
    return cache, lambda: cache.tell_return(session_hint("5", return_in_s=10))


SHAPES: dict[str, tuple[Callable[[int], Shaped], int, int]] = {
    # what costs the same: how the shape is built, a small size, a large one
    "a waiting head of a long conversation is matched again": (waiting_head, 50, 500),
    "one block leaves a long run": (long_run, 100, 5000),
    "a long request gets one block more": (long_request, 100, 5000),
    "the parent of children on the host leaves the device": (many_children, 10, 2000),
    "a copy among those of many others has failed": (many_others, 10, 1000),
    "a piece of a long run is stored": (stored_piece, 256, 4096),
    "the blocks of a turn are stored one turn late": (stored_one_turn_late, 256, 4096),
    "a piece of a long prompt is kept on the device": (piece_on_the_device, 256, 4096),
    "a session leaves": (lambda count: evicting(sessions(count)), 100, 2000),
    "a session with a told time leaves": (lambda count: evicting(sessions(count, 1e6)), 100, 2000),
    "an ended session leaves": (lambda count: evicting(sessions(count, LAST_TURN)), 100, 2000),
    "it is told when a session comes back": (session_told_later, 100, 2000),
}


@pytest.mark.parametrize("operation", SHAPES)
def test_cost_of_an_operation_does_not_grow(operation: str) -> None:
    build, small, large = SHAPES[operation]
    costs = []
    for size in (small, large):
        cache, operate = build(size)
        costs.append(work(operate))
        cache.check()
    assert costs[1].is_like(costs[0])


def test_run_is_moved_a_few_times_while_its_told_wait_gets_shorter() -> None:
    """From a told time of an hour to its end, and until all are overdue."""
    per_run = []
    for count in (100, 1000):
        cache = sessions(count, 3600)

        def look(cache: CacheManager = cache, began: int = cache._history.now) -> None:
            for minute in range(300):
                cache._history.now = began + minute * 60 * TICKS_PER_SECOND
                next(cache._residency.device_order.candidates())

        per_run.append(work(look).calls / count)
        assert cache.stats().counters.wrong_told_returns == count
        cache.check()
    assert per_run[1] <= per_run[0]


def chain_on_the_host(depth: int) -> CacheManager:
    """A chain of one-block runs that only the host holds, its root the oldest of them."""
    cache = manager(depth + 2, depth + 2, max_queued_events=0)
    hashes = blocks(depth)
    for end in range(1, depth + 1):
        play(cache, "stem", hashes[:end])
        play(cache, "branch", [*hashes[:end], *blocks(1, end)])  # keeps the stem's runs apart
    slots = cache.lend(depth + 2)
    assert not isinstance(slots, NoSpace)
    cache.take_back(slots)
    cache.take_swap_step()
    return cache


def test_a_chain_on_the_host_is_not_walked_for_every_block_that_leaves_it() -> None:
    per_block = []
    for depth in (20, 400):
        cache = chain_on_the_host(depth)
        assert cache.stats().host_free_blocks == 0
        play(cache, "warm", blocks(2, 10_000))

        def swap_out(cache: CacheManager = cache, depth: int = depth) -> None:
            for number in range(10):
                play(cache, "new", blocks(depth // 4, 20_000 + number))

        per_block.append(work(swap_out).calls / (10 * (depth // 4)))
        cache.check()
    assert per_block[1] <= 2 * per_block[0]


def test_reset_costs_blocks_in_use_and_is_finished_by_later_steps() -> None:
    calls = []
    for others in (10, 2000):
        cache = manager(others + 10, others + 10, "write_through", max_queued_events=0)
        for number in range(others):
            play(cache, "other", blocks(1, 1 + number))
        begin(cache, "r", blocks(4))
        cache.take_swap_step()
        calls.append(work(cache.reset_cache).calls)
        cache.check()
        cache.finish("r")
        most = max(work(cache.take_swap_step).calls for _ in range(10))
        cache.check_idle()
        assert not cache._tree._ruins
        assert most < 512 * 20
    assert calls[1] <= 2 * calls[0]


def test_loading_a_piece_of_a_prompt_costs_the_same_at_any_depth() -> None:
    cache = manager(4, 4200, max_queued_events=0)
    hashes = blocks(4128)

    def load(first: int) -> None:
        cache.begin_load("load", hashes, first, most=32)
        assert cache.complete_load("load", 32) == 32

    costs = {first: work(lambda first=first: load(first)) for first in range(0, len(hashes), 32)}  # type: ignore[misc]
    # Joining moves blocks O(log n) times; the steps in between do not grow.
    assert sorted(cost.calls for cost in costs.values())[-3] <= 2 * costs[256].calls + 10
    assert costs[4096].is_like(costs[256])
    cache.check()


# ---- runs that a search for a victim looks at


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[list[BlockHash]]:
    """The blocks of every one."""
    seen: list[list[BlockHash]] = []
    plain = EvictionOrder.first

    def counting(policy: EvictionOrder) -> Run | None:
        if (found := plain(policy)) is not None:
            seen.append(found.hashes)
        return found

    monkeypatch.setattr(EvictionOrder, "first", counting)
    return seen


def test_blocks_in_use_are_passed_over_once_not_at_every_eviction(looks: list[list[BlockHash]]) -> None:
    cache = manager(301)
    for number in range(300):
        play(cache, f"first {number}", blocks(1, number))
        begin(cache, f"running {number}", blocks(1, number))
    for number in range(100):
        play(cache, f"short {number}", blocks(1, 1000 + number))
    assert len(looks) <= 300 + 2 * 100
    for number in range(300):
        cache.finish(f"running {number}")
    cache.check_idle()
    looks.clear()
    play(cache, "long", blocks(301, 5000))  # everything is evicted again, in the order it was used last
    assert len(looks) == 301
    assert looks[:2] == [blocks(1, 1099), blocks(1, 0)]


def test_blocks_being_copied_are_passed_over_once(looks: list[list[BlockHash]]) -> None:
    """One step evicts many children, and their parents that the host already has, while the host is full."""
    count = 200
    cache = manager(2 * count, 3 * count)
    for number in range(count):
        play(cache, f"parent {number}", blocks(1, number))
    play(cache, "flush", blocks(2 * count, 1000))
    for number in range(count):
        play(cache, f"child {number}", [*blocks(1, number), *blocks(1, 2000 + number)])
    looks.clear()
    play(cache, "huge", blocks(2 * count, 5000))
    assert len(looks) <= 12 * count
    cache.check_idle()
    looks.clear()
    for number in range(count):  # what was passed over can be evicted again
        play(cache, f"other {number}", blocks(1, 6000 + number))
    assert cache.stats().host_free_blocks == 0
    cache.take_swap_step()
    cache.check_idle()


# ---- what is kept, and what is freed


@pytest.mark.parametrize(
    ("policy", "host", "eviction", "limit"),
    [("write_back", 0, "lru", 430), ("write_through", 4000, "lru", 560), ("write_back", 0, "adaptive", 1000)],
)
def test_memory_of_the_worst_shape(policy: str, host: int, eviction: str, limit: int) -> None:
    """Every request has one block of its own and shares none: a tree node for each."""
    hashes = blocks(4000, 1)
    gc.collect()
    tracemalloc.start()
    config = KVCacheConfig(4000, host, block_size=1, write_policy=policy, eviction_policy=eviction, max_queued_events=0)
    cache = CacheManager(config, logs_traffic=False)  # the log has a limit of its own
    for number, digest in enumerate(hashes):
        play(cache, str(number), [digest])
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / 4000 + 65 < limit  # 65: the digest itself, which was there before
    assert cache.stats().device_free_blocks == 0


@pytest.mark.parametrize("eviction", ["lru", "adaptive"])
def test_runs_forgotten_by_a_reset_are_freed_without_the_garbage_collector(eviction: str) -> None:
    def num_runs() -> int:
        return sum(isinstance(each, Run) for each in gc.get_objects())

    gc.collect()
    gc.disable()
    before, cache = num_runs(), manager(40, 40, "write_through", max_queued_events=0, eviction_policy=eviction)
    for number in range(10):
        play(cache, str(number), [*blocks(2), *blocks(1, 100 + number)])
    cache.reset_cache()
    cache.take_swap_step()
    left = num_runs() - before
    gc.enable()
    assert left < 5, "the root, and those of the last copies, which may fail"
