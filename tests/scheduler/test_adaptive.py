"""The adaptive order: recency until something is learned, then the worth of blocks; what is expected stays."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import BlockHash, NoSpace
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.policies import eviction
from fastdeploy_kvcache_v1.scheduler.reuse.history import FIRST_TURN, LEFT, NUM_CLASSES, ReuseHistory
from fastdeploy_kvcache_v1.scheduler.reuse.rates import NUM_AGES, ReuseRates

from .scenario import cached, manager, run

PREFIX_BLOCKS, TAIL_BLOCKS = 6, 4


def serve(cache: CacheManager, name: str, blocks: list[str]) -> int:
    """One request, from its match to its end; returns how many of its blocks were found."""
    hashes = [BlockHash("/".join(blocks[: end + 1]).encode()) for end in range(len(blocks))]
    match = cache.match_prefix(name, GivenHashes(hashes, len(hashes) + 1))
    assert not isinstance(cache.allocate(name, len(hashes) + 1), NoSpace)
    cache.take_swap_step()
    cache.commit(name, len(hashes))
    cache.finish(name)
    return match.num_tokens


def favourites_and_strangers(cache: CacheManager, seed: int, num_requests: int) -> int:
    """Half of the requests share one of a few prefixes, half are never seen again. Returns blocks found."""
    dice, found = random.Random(seed), 0
    for number in range(num_requests):
        name = f"favourite {dice.randrange(6)}" if dice.random() < 0.5 else f"stranger {number}"
        prefix = [f"{name} {index}" for index in range(PREFIX_BLOCKS)]
        found += serve(cache, str(number), prefix + [f"tail {number} {index}" for index in range(TAIL_BLOCKS)])
    return found


def test_adaptive_order_keeps_reused_blocks_that_lru_evicts() -> None:
    found = {name: favourites_and_strangers(manager(40, eviction_policy=name), 1, 1500) for name in ("lru", "adaptive")}
    assert found["adaptive"] > 1.8 * found["lru"]


def test_adaptive_host_tier_keeps_reused_blocks_and_declines_others() -> None:
    caches = {name: manager(16, 40, "auto", eviction_policy=name) for name in ("lru", "adaptive")}
    found = {name: favourites_and_strangers(cache, 2, 1500) for name, cache in caches.items()}
    assert found["adaptive"] > 1.3 * found["lru"]
    counters = caches["adaptive"].stats().counters
    assert counters.backup_declined_blocks > 1000
    assert counters.swap_out_blocks < caches["lru"].stats().counters.swap_out_blocks / 2
    for cache in caches.values():
        cache.check_idle()


def test_block_worth_less_than_the_host_victim_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReuseHistory, "worth", lambda history, run: 0.0 if b"x" in run.first_hash else 1.0)
    cache = manager(2, 2, "auto", host_eviction="adaptive")
    for text in ("ab!", "xy!", "cd!"):
        run(cache, text)
    assert cached(cache, "ab") == ["host"] * 2
    assert cached(cache, "xy") == []
    assert cache.stats().counters.backup_declined_blocks == 2
    run(cache, "ef!")
    assert cached(cache, "cd") == ["host"] * 2, "worth as much as `ab`: the older one goes"
    assert cached(cache, "ab") == []
    cache.check_idle()


def test_candidates_are_in_order_of_worth_when_prompts_share_prefixes(monkeypatch: pytest.MonkeyPatch) -> None:
    worths = [[1.037**number / (1 + age) for age in range(NUM_AGES)] for number in range(NUM_CLASSES)]
    monkeypatch.setattr(ReuseRates, "learned", lambda rates, *doubts: worths)
    monkeypatch.setattr(eviction, "COMPARISONS", 1 << 62)  # all queues are compared each time
    cache, dice, use_classes = manager(40, eviction_policy="adaptive"), random.Random(1), set()
    for number in range(200):
        text = "".join(dice.choices("abcde", (12, 6, 3, 2, 1), k=dice.randint(1, 6)))
        run(cache, text + "!", str(number))
        candidates = cache._residency.device_order.candidates()
        # Blocks that are left behind are queued when that happens, not by their last use.
        found = [(cache._history.worth(each), each.last_use) for each in candidates if each.use_class != LEFT]
        assert found == sorted(found)
        use_classes |= {each.use_class for each in cache._tree.runs()}
    assert len(use_classes) >= 8, "shared blocks, and sessions with some turns"


def test_only_the_last_tier_goes_by_worth() -> None:
    assert KVCacheConfig(4, 0, block_size=1, eviction_policy="adaptive").device_order == "adaptive"
    two = KVCacheConfig(4, 4, block_size=1, eviction_policy="adaptive")
    assert (two.device_order, two.host_order) == ("lru", "adaptive")


def test_a_run_that_was_only_looked_at_is_whole_again() -> None:
    cache = manager(8, eviction_policy="adaptive")
    for text in ("abcd!", "abcd!"):
        run(cache, text)
    assert cached(cache, "ab") == ["device"] * 2
    assert [each.length for each in cache._tree.runs()] == [4]


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_conversation_is_one_run_of_the_class_of_its_last_turn(chunk: int) -> None:
    """However its blocks are committed: at once, or little by little as they are computed."""
    cache = manager(80, eviction_policy="adaptive")
    hashes = [BlockHash(b"%d" % index) for index in range(72)]
    for turn, end in enumerate((18, 36, 54, 72)):
        found = cache.match_prefix("turn", GivenHashes(hashes[:end], end + 1)).num_blocks
        cache.allocate("turn", end)
        cache.take_swap_step()
        for computed in range(found, end, chunk):
            cache.commit("turn", min(computed + chunk, end))
        cache.finish("turn")
        cache.check()
        assert [(run.length, run.use_class) for run, _ in cache._tree.look(hashes)] == [(end, FIRST_TURN + turn)]
