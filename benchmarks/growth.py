"""Cost of each operation of the CacheManager at the largest size over that at the smallest, medians taken in turns.
Shapes are those of an adversary: a long conversation, a long run, many children, a deep chain, a big cache.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from time import perf_counter

from _support import begin, made_small, median, sized

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import BlockHash, CacheLevel, CopyResult, NoSpace
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher, GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

Seconds = Iterator[float]
REPEATS = sized(41, 3)
MOST = sized(1_000_000, 600)
"""Larger sizes are left out."""

PIECE = 32
"""Blocks that the storage tier loads or stores at once."""


def manager(device: int, host: int = 0, policy: str = "write_back") -> CacheManager:
    return made_small(
        KVCacheConfig(device, host, block_size=1, write_policy=WritePolicy(policy), max_queued_events=0),
    )


def blocks(count: int, tag: int = 0) -> list[BlockHash]:
    return [BlockHash(tag.to_bytes(16, "big") + number.to_bytes(16, "big")) for number in range(count)]


def play(cache: CacheManager, sequence: GivenHashes) -> float:
    """Play one whole request. Returns the seconds of match, allocate, step, commit and finish."""
    begin = perf_counter()
    cache.match_prefix("r", sequence)
    allocation = cache.allocate("r", sequence.num_tokens - 1)
    assert not isinstance(allocation, NoSpace), "the device tier must hold the request"
    cache.take_swap_step()
    cache.commit("r", sequence.num_tokens - 1)
    cache.finish("r")
    return perf_counter() - begin


def given(hashes: list[BlockHash]) -> GivenHashes:
    return GivenHashes(hashes, len(hashes) + 1)


def timed(operation: Callable[[], object]) -> float:
    begin = perf_counter()
    operation()
    return perf_counter() - begin


def conversation(policy: str, host: int) -> Callable[[int], Seconds]:
    """A turn of two new blocks, with `turns` before it."""

    def measure(turns: int) -> Seconds:
        hashes = blocks(2 * (turns + REPEATS))
        cache = manager(len(hashes) + 2, len(hashes) if host else 0, policy)
        for turn in range(1, turns + REPEATS):
            seconds = play(cache, given(hashes[: 2 * turn]))
            if turn > turns:
                yield seconds

    return measure


def branching(turns: int) -> Seconds:
    """A turn of a conversation with a second answer to every turn, so that the tree forks at each."""
    hashes = blocks(2 * (turns + REPEATS))
    cache = manager(4 * len(hashes))
    for turn in range(1, turns + REPEATS):
        play(cache, given([*hashes[: 2 * turn - 1], *blocks(1, turn)]))
        seconds = play(cache, given(hashes[: 2 * turn]))
        if turn > turns:
            yield seconds


def waiting_head(turns: int) -> Seconds:
    """A request that continues a conversation of `turns` is matched, does not fit, and is released."""
    hashes = blocks(2 * turns)
    cache = manager(len(hashes) + 4, len(hashes), "write_through_selective")
    for turn in range(1, turns + 1):
        play(cache, given(hashes[: 2 * turn]))
    waiting = given([*hashes, *blocks(10, 1)])

    def retry() -> None:
        cache.match_prefix("head", waiting)
        assert isinstance(cache.allocate("head", waiting.num_tokens), NoSpace)
        cache.release("head")

    for _ in range(REPEATS):
        yield timed(retry)


def evict_one(length: int) -> Seconds:
    """A request of one block takes the last block of a run of `length`."""
    cache = manager(length)
    play(cache, given(blocks(length)))
    for number in range(1, REPEATS):
        yield play(cache, given(blocks(1, number)))


def append_one(length: int) -> Seconds:
    """A request with `length` blocks computes one more."""
    hashes = blocks(length + REPEATS)
    cache = manager(len(hashes))
    sequence = GivenHashes(hashes, length + 1)
    cache.match_prefix("r", sequence)
    cache.allocate("r", length)
    cache.take_swap_step()
    cache.commit("r", length)
    for _ in range(REPEATS - 1):
        begin = perf_counter()
        cache.allocate("r", sequence.num_tokens)
        cache.take_swap_step()
        sequence.num_tokens += 1
        cache.commit("r", sequence.num_tokens - 1)
        yield perf_counter() - begin


def many_children(count: int) -> Seconds:
    """A prefix with `count` children on the host is swapped in and evicted again."""
    cache = manager(4, count + 16)
    stem = blocks(1)
    for number in range(count):
        play(cache, given([*stem, *blocks(1, 1 + number)]))
    for number in range(REPEATS):
        play(cache, given(blocks(4, count + 1 + number)))
        yield play(cache, given(stem)) + play(cache, given(blocks(4, 2 * count + 1 + number)))


def host_chain(depth: int) -> Seconds:
    """One block is evicted from a host tier that a chain of `depth` runs fills, its root the oldest."""
    hashes = blocks(depth)
    cache = manager(depth + 2, depth, "write_back")
    for end in range(1, depth + 1):
        play(cache, given(hashes[:end]))
        play(cache, given([*hashes[:end], *blocks(1, end)]))  # keeps the runs apart
    for number in range(REPEATS):
        yield play(cache, given(blocks(1, depth + 1 + number)))


def failed_copy(count: int) -> Seconds:
    """A copy of four blocks fails, in a cache of `count` runs."""
    cache = manager(count + 4 * REPEATS, count + 4 * REPEATS, "write_through")
    for number in range(count):
        play(cache, given(blocks(1, 1 + number)))
    for number in range(REPEATS):
        play(cache, given(blocks(4, count + 1 + number)))
        step = cache.take_swap_step()
        failed = CopyResult(
            step.step, CacheLevel.DEVICE, CacheLevel.HOST, 4, 0, 0.0, step.swap_out.target_slots[-4:], "injected"
        )
        yield timed(lambda failed=failed: cache.transfer_failed(failed))  # type: ignore[misc]


def big_cache(size: int) -> Seconds:
    """A request of eight blocks, half of them cached, in a full cache of `size` blocks."""
    cache = manager(size)
    numbers = random.Random(1)
    stems = max(1, size // 16)
    for number in range(2 * stems):
        play(cache, given([*blocks(4, number % stems), *blocks(4, stems + number)]))
    for number in range(sized(40, 2) * REPEATS):
        yield play(cache, given([*blocks(4, numbers.randrange(stems)), *blocks(4, 4 * stems + number)]))


def reset(count: int) -> Seconds:
    """Forget `count` runs: makes a new list of free slots, and takes the runs apart later."""
    for _ in range(sized(5, 2)):
        cache = manager(count)
        for number in range(count):
            play(cache, given(blocks(1, number)))
        gc.collect()
        yield timed(cache.reset_cache)


def step_after_reset(count: int) -> Seconds:
    """A step while `count` forgotten runs are being taken apart."""
    cache = manager(count)
    for number in range(count):
        play(cache, given(blocks(1, number)))
    cache.reset_cache()
    for _ in range(min(REPEATS, count // 512)):
        yield timed(cache.take_swap_step)


def load_piece(length: int) -> Seconds:
    """32 stored blocks are loaded, behind `length` that were loaded in pieces of 32 as well."""
    hashes = blocks(length + PIECE * REPEATS)
    cache = manager(4, len(hashes))

    def load(first: int) -> None:
        lent = cache.begin_load("load", hashes, first, most=PIECE)
        assert not isinstance(lent, NoSpace), "the host tier must hold the prompt"
        cache.complete_load("load", len(lent.slots))

    for first in range(0, len(hashes), PIECE):
        seconds = timed(partial(load, first))
        if first >= length:
            yield seconds


def store_piece(length: int) -> Seconds:
    """32 of more than `length` blocks that one step copied to the host are pinned for a store and unpinned."""
    hashes = blocks(length + PIECE * REPEATS)
    cache = manager(len(hashes), len(hashes), "write_through")
    play(cache, given(hashes))
    step = cache.take_swap_step()

    def store(first: int) -> None:
        slots = step.swap_out.target_slots[first : first + PIECE]
        assert cache.begin_store("store", step.step, frozenset(slots)).slots == slots
        cache.end_store("store")

    for first in range(0, PIECE * REPEATS, PIECE):
        yield timed(partial(store, first))


def hash_prompt(tokens: int) -> Seconds:
    numbers = random.Random(1)
    ids = [numbers.randrange(150_000) for _ in range(tokens)]
    for _ in range(sized(5, 2)):
        yield timed(lambda: BlockHasher(64).extend(ids))


def long_prompt(tokens: int) -> Seconds:
    """Match, allocate and release of a cached prompt, blocks of 64 tokens."""
    cache = made_small(KVCacheConfig(tokens // 64 + 2, max_queued_events=0))
    sequence = GivenHashes(blocks(tokens // 64), tokens + 1)
    play(cache, sequence)

    def again() -> None:
        cache.match_prefix("s", sequence)
        assert not isinstance(cache.allocate("s", tokens + 1), NoSpace)
        cache.release("s")

    for _ in range(REPEATS):
        yield timed(again)


CASES: tuple[tuple[str, Callable[[int], Seconds], tuple[int, ...], bool], ...] = (
    (
        "a turn of a conversation, write_back, one tier; turns before",
        conversation("write_back", 0),
        (100, 2000, 20_000),
        False,
    ),
    (
        "the same, write_through_selective, two tiers",
        conversation("write_through_selective", 1),
        (100, 2000, 20_000),
        False,
    ),
    ("the same, write_through, two tiers", conversation("write_through", 1), (100, 2000, 20_000), False),
    ("the same where every turn has another answer; forks above it", branching, (100, 500, 2000), True),
    ("a waiting head matched again; turns of its conversation", waiting_head, (100, 2000, 20_000), False),
    ("match, allocate, release of a cached prompt; tokens", long_prompt, (8192, 131_072, 1_000_000), False),
    ("a block leaves a run; its blocks", evict_one, (100, 4000, 64_000, 1_000_000), False),
    ("a block is added to a request; its blocks", append_one, (100, 4000, 64_000, 1_000_000), False),
    ("a prefix comes and goes; its children on the host", many_children, (100, 10_000, 100_000), False),
    ("a block leaves a chain on the host; its runs", host_chain, (10, 400, 2000), False),
    ("a failed copy of 4 blocks; runs in the cache", failed_copy, (100, 10_000, 500_000), False),
    ("a request of 8 blocks, 4 of them cached; blocks in the cache", big_cache, (10_000, 100_000, 1_000_000), False),
    ("a step after a reset; runs forgotten", step_after_reset, (30_000, 500_000), False),
    ("a reset; runs forgotten", reset, (1000, 100_000, 500_000), True),
    ("32 stored blocks are loaded; blocks before them", load_piece, (512, 4096, 16_384), False),
    ("32 blocks on the host are stored; blocks copied with them", store_piece, (512, 4096, 16_384), False),
    ("hashing a prompt; tokens", hash_prompt, (8192, 131_072, 1_000_000), True),
)


def in_turns(measure: Callable[[int], Seconds], sizes: tuple[int, ...]) -> dict[str, float]:
    """Median microseconds by size. The sizes take turns."""
    measuring = {size: measure(size) for size in sizes}
    seconds: dict[int, list[float]] = {size: [] for size in sizes}
    for each in measuring.values():
        next(each)  # sets it up
    gc.collect()
    gc.freeze()
    while measuring:
        for size in list(measuring):
            value = next(measuring[size], None)
            if value is None:
                del measuring[size]
            else:
                seconds[size].append(value)
    gc.unfreeze()
    return {str(size): 1e6 * median(values) for size, values in seconds.items()}


def main() -> None:
    run = begin()
    rows = {}
    for name, measure, every_size, work_grows in CASES:
        sizes = tuple(size for size in every_size if size <= MOST) or every_size[:1]
        medians = in_turns(measure, sizes)
        ratio = medians[str(sizes[-1])] / medians[str(sizes[0])]
        rows[name] = {"median_us": medians, "largest_over_smallest": ratio, "work_grows": work_grows}
        print(f"{name}: {', '.join(f'{size}: {us:.1f}' for size, us in medians.items())} us, {ratio:.2f}x", flush=True)
    run.save({"rows": rows})


if __name__ == "__main__":
    main()
