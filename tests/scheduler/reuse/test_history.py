"""ReuseHistory: what it says of prompts, against a record of every request; bounds of its memory and its work."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.scheduler.reuse.history import ReuseHistory, Stretch
from fastdeploy_kvcache_v1.scheduler.reuse.rates import CLASSES, MOST_USES
from fastdeploy_kvcache_v1.scheduler.reuse.watched import Group, last_watched

from ..scenario import cached, manager, prompt, run, start


def hashes(name: object, count: int) -> list[BlockHash]:
    return [BlockHash(f"{name} {index}".encode()) for index in range(count)]


def serve(history: ReuseHistory, blocks: list[BlockHash]) -> list[Stretch]:
    """One request that computes all its blocks."""
    return history.ended(blocks, len(blocks), history.arrived(blocks, 0))


def test_last_watched_is_the_deepest_watched_block_of_a_prompt() -> None:
    assert [last_watched(depth) for depth in (0, 1, 7, 8, 9, 10, 11)] == [0, 1, 7, 8, 8, 10, 10]


def test_stretches_count_uses_of_blocks_even_if_they_are_not_cached() -> None:
    history = ReuseHistory(lambda: 1000, lambda: 100)
    system, chat = hashes("system", 16), hashes("chat", 16)
    assert serve(history, system + hashes("other", 10)) == [(24, 0)]
    assert serve(history, system + chat) == [(32, 0), (16, 1)]
    assert serve(history, system + chat + hashes("more", 16)) == [(48, 0), (32, 1), (16, 2)]
    for _ in range(20):
        stretches = serve(history, system + chat)
    assert stretches == [(32, CLASSES[MOST_USES])]


@pytest.mark.parametrize("seed", range(8))
def test_against_a_record_of_every_request(seed: int) -> None:
    """Prompts of a tree, some of them in use at the same time, and so short that every block is watched."""
    dice = random.Random(seed)
    history = ReuseHistory(lambda: 100_000, lambda: 50)
    found: Counter[BlockHash] = Counter()
    known: set[BlockHash] = set()
    running: list[tuple[list[BlockHash], Sequence[Group]]] = []
    for _ in range(600):
        if running and dice.random() < 0.5:
            blocks, before = running.pop(dice.randrange(len(running)))
            stretches = history.ended(blocks, len(blocks), before)
            known.update(blocks)
            for depth, block in enumerate(blocks, start=1):
                _, use_class = min(stretches, key=lambda stretch: (stretch[0] < depth, stretch[0]))
                assert use_class == CLASSES[min(found[block], MOST_USES)]
        else:
            name, blocks = "", []
            for _ in range(dice.randint(1, 8)):
                name += dice.choice("ab")
                blocks.append(BlockHash(name.encode()))
            before = history.arrived(blocks, 0)
            found.update(block for block in blocks if block in known)
            running.append((blocks, before if dice.random() < 0.9 else ()))


def test_memory_is_bounded_and_the_start_of_a_prompt_is_forgotten_last() -> None:
    history = ReuseHistory(lambda: 100, lambda: 100)
    for number in range(200):
        serve(history, hashes(number, 50))
        assert len(history) <= 100
    assert serve(history, hashes(199, 50))[-1][1] == 1
    assert serve(history, hashes(0, 50))[-1][1] == 0
    serve(history, hashes("long", 1 << 14))
    assert len(history) <= 100


def test_a_request_that_was_only_matched_or_resumes_teaches_nothing() -> None:
    cache = manager(8, eviction_policy="adaptive")
    run(cache, "ab!")
    assert cache._history.now == 1
    cache.match_prefix("waits", prompt("ab!"))
    cache.release("waits")
    start(cache, "ab!", "resumes")
    cache.preempt("resumes")
    assert cache._history.now == 1
    cache.match_prefix("resumes", prompt("ab!"), resumed=True)
    cache.allocate("resumes", 3)
    cache.take_swap_step()
    cache.finish("resumes")
    assert cache._history.now == 1


def test_nothing_is_watched_for_an_order_that_does_not_learn() -> None:
    cache = manager(8, eviction_policy="lru")
    run(cache, "ab!")
    assert cache.stats().watched_blocks == 0
    assert cache.stats().recency_rules


def test_reset_forgets_watched_blocks_and_keeps_learned_rates() -> None:
    cache = manager(8, eviction_policy="adaptive")
    for text in ("ab!", "ab!", "cd!"):
        run(cache, text)
    assert cache.stats().watched_blocks == 4
    cache.reset_cache()
    assert cache.stats().watched_blocks == 0
    assert cache._history.now == 3
    run(cache, "ab!")
    assert cache.stats().watched_blocks == 2
    cache.check_idle()


def test_a_new_run_is_cut_where_its_blocks_are_not_of_one_kind() -> None:
    """A prefix that was evicted and computed again with a tail that is new."""
    cache = manager(8, eviction_policy="adaptive")
    run(cache, "abcd!")
    run(cache, "12345678!")
    assert cached(cache, "abcd") == []
    run(cache, "abcdwxyz!")
    use_classes = {b"".join(block[-1:] for block in each.hashes): each.use_class for each in cache._tree.runs()}
    assert use_classes == {b"abcd": 1, b"wxyz": 0}
    cache.check_idle()


def test_recency_is_not_judged_before_anything_had_to_leave() -> None:
    cache = manager(1000, eviction_policy="adaptive")
    for number in range(100):
        run(cache, f"{chr(256 + number)}b!")
    assert cache.stats().recency_rules
    small = manager(10, eviction_policy="adaptive")
    for number in range(100):
        run(small, f"{chr(256 + number)}b!")
    assert not small.stats().recency_rules
