"""TrafficLog: what it remembers of requests, and how much."""

from hashlib import sha256
from itertools import count
from sys import getsizeof

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.contract.sessions import UNTOLD, session_hint
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.traffic.log import (
    MOST_BLOCKS,
    MOST_REQUESTS,
    NAME_BYTES,
    USUAL_RATE,
    Traffic,
    rate_of,
)


def serve(manager, name, hashes, *, session=UNTOLD):
    num_tokens = len(hashes) * manager.config.block_size
    sequence = GivenHashes(hashes, num_tokens + 1, session)
    manager.match_prefix(name, sequence)
    manager.allocate(name, num_tokens)
    manager.take_swap_step()
    manager.commit(name, num_tokens)
    manager.finish(name)


def new_blocks(number, count):
    return [BlockHash(sha256(b"%d %d" % (number, index)).digest()) for index in range(count)]


def test_log_has_what_a_simulation_asks_for():
    manager = CacheManager(KVCacheConfig(64, 0, block_size=1), count().__next__)
    head = new_blocks(0, 8)
    serve(manager, "first", head)
    serve(manager, "second", [*head, *new_blocks(1, 4)], session=session_hint("a", return_in_s=7.0))
    traffic = manager.traffic()
    first, second = traffic.rows
    assert (traffic.rate, traffic.is_whole) == (1, True)
    assert (first.started, first.computed, first.grown, first.ended) == (0, 1, 0, 1)
    assert (second.started, second.ended) == (1, 2)
    assert (second.num_tokens, second.num_hit, second.num_findable, second.num_prompt) == (13, 8, 12, 12)
    assert (second.reads, second.writes, second.is_resumed, second.return_in_s) == (True, True, False, 7.0)
    assert second.session == session_hint("a").name
    assert second.names[: len(first.names)] == first.names
    assert len(second.names) == 12 * NAME_BYTES
    assert second.started_s < second.ended_s


def test_sampled_block_is_sampled_in_every_prompt():
    manager = CacheManager(KVCacheConfig(100_000, 0, block_size=1))
    for number in range(64):
        head = new_blocks(number, 100)
        for length in (3, 50, 100):
            serve(manager, f"{number} {length}", head[:length])
    traffic = manager.traffic()
    assert traffic.rate == USUAL_RATE
    rows = iter(traffic.rows)
    for short, middle, whole in zip(rows, rows, rows, strict=True):
        assert whole.names.startswith(middle.names)
        assert middle.names.startswith(short.names)
        assert [each.num_prompt for each in (short, middle)] == [len(each.names) // 8 for each in (short, middle)]
        assert len(whole.names) // NAME_BYTES in (100 // USUAL_RATE, 100 // USUAL_RATE + 1)
    sampled = sum(row.num_prompt for row in traffic.rows[2::3])
    assert sampled * USUAL_RATE == pytest.approx(64 * 100, rel=0.05)


@pytest.mark.parametrize(("num_hit", "computed"), [(7, 0), (8, 2)])
def test_a_prompt_found_as_a_whole_counts_as_computed_in_its_next_step(num_hit, computed):
    manager = CacheManager(KVCacheConfig(64, 0, block_size=4), count().__next__)
    head = new_blocks(0, 8)
    serve(manager, "first", head[:num_hit])
    manager.match_prefix("second", GivenHashes(head, 33))
    manager.allocate("second", 32)
    manager.take_swap_step()
    manager.finish("second")
    row = manager.traffic().rows[-1]
    assert (row.started, row.computed, row.num_hit) == (1, computed, 4 * num_hit)


@pytest.mark.parametrize(("num_requests", "num_blocks"), [(MOST_REQUESTS + 9, 1), (MOST_BLOCKS // 400 + 9, 400)])
def test_log_is_bounded_and_forgets_the_oldest(num_requests, num_blocks):
    manager = CacheManager(KVCacheConfig(512, 0, block_size=1, eviction_policy="lru"))
    for number in range(num_requests):
        serve(manager, str(number), new_blocks(number, num_blocks))
    traffic = manager.traffic()
    assert not traffic.is_whole
    assert num_requests - 12 < len(traffic.rows) + 2 <= num_requests
    assert sum(map(getsizeof, (value for row in traffic.rows for value in row))) < 8 << 20
    assert traffic.rows[-1].num_prompt == num_blocks


def test_rate_keeps_the_small_cache_and_the_history_in_bounds():
    rates = {size: rate_of(size) for size in (1, 1024, 1025, 5000, 40_000, 600_000, 10**7)}
    assert rates == {1: 1, 1024: 1, 1025: 2, 5000: 8, 40_000: 16, 600_000: 32, 10**7: 512}


def test_reset_and_another_size_begin_the_log_anew():
    manager = CacheManager(KVCacheConfig(64, 0, block_size=1))
    serve(manager, "before", new_blocks(0, 8))
    running = GivenHashes(new_blocks(1, 4), 5)
    manager.match_prefix("running", running)
    manager.allocate("running", 4)
    manager.take_swap_step()
    manager.reset_cache()
    manager.finish("running")
    assert manager.traffic() == Traffic(1, True, [])
    serve(manager, "after", new_blocks(0, 8))
    manager.resize_device_pool(5000)
    assert manager.traffic() == Traffic(8, False, [])
