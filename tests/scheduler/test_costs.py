"""Costs that must not grow with what is cached, pinned or being copied: counted in runs looked at, never in time."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from fastdeploy_kvcache_v1.metadata import Allocation, BlockHash, CacheLevel, TransferResult
from fastdeploy_kvcache_v1.scheduler import cache_utils
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import BlockHasher, GivenHashes, MultimodalItem
from fastdeploy_kvcache_v1.scheduler.policies.lru import LeastRecentlyUsed
from fastdeploy_kvcache_v1.scheduler.run import Run

from .garbage import no_cyclic_garbage
from .scenario import manager


def chain(*names: object) -> list[BlockHash]:
    return [BlockHash(repr(names[: end + 1]).encode()) for end in range(len(names))]


def start(cache: CacheManager, name: str, hashes: list[BlockHash]) -> None:
    cache.match_prefix(name, GivenHashes(hashes, len(hashes) + 1))
    assert isinstance(cache.allocate(name, len(hashes)), Allocation)
    cache.take_swap_step()
    cache.commit(name, len(hashes))


def run(cache: CacheManager, name: str, hashes: list[BlockHash]) -> None:
    start(cache, name, hashes)
    cache.finish(name)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[list[BlockHash]]:
    """The blocks of every run that a search for a victim looked at."""
    seen: list[list[BlockHash]] = []
    plain = LeastRecentlyUsed.candidates

    def counting(policy: LeastRecentlyUsed) -> Iterator[Run]:
        for found in plain(policy):
            seen.append(found.hashes)
            yield found

    monkeypatch.setattr(LeastRecentlyUsed, "candidates", counting)
    return seen


def test_blocks_in_use_are_passed_over_once_not_at_every_eviction(looks: list[list[BlockHash]]) -> None:
    cache = manager(301)
    for number in range(300):
        run(cache, f"first {number}", chain(number))
        start(cache, f"running {number}", chain(number))
    for number in range(100):
        run(cache, f"short {number}", chain(f"short {number}"))
    assert len(looks) <= 300 + 2 * 100
    for number in range(300):
        cache.finish(f"running {number}")
    cache.check_idle()
    looks.clear()
    run(cache, "long", chain(*range(1000, 1301)))  # everything is evicted again, in the order it was used last
    assert len(looks) == 301
    assert looks[:2] == [chain("short 99"), chain(0)]


def test_blocks_being_copied_are_passed_over_once(looks: list[list[BlockHash]]) -> None:
    """One step evicts many children, and their parents that the host already has, while the host is full."""
    count = 200
    cache = manager(2 * count, 3 * count)
    for number in range(count):
        run(cache, f"parent {number}", chain(number))
    run(cache, "flush", chain(*range(1000, 1000 + 2 * count)))
    for number in range(count):
        run(cache, f"child {number}", chain(number, "child"))
    looks.clear()
    run(cache, "huge", chain(*range(5000, 5000 + 2 * count)))
    assert len(looks) <= 12 * count
    cache.check_idle()
    looks.clear()
    for number in range(count):  # what was passed over can be evicted again
        run(cache, f"other {number}", chain("other", number))
    assert cache.stats().host_free_blocks == 0
    cache.take_swap_step()
    cache.check_idle()


@pytest.mark.parametrize(("policy", "host", "limit"), [("write_back", 0, 400), ("write_through", 20_000, 560)])
def test_memory_of_the_worst_shape(policy: str, host: int, limit: int) -> None:
    """Every request has one block of its own and shares none: a tree node for each."""
    hashes = [BlockHash(bytes(28) + number.to_bytes(4, "big")) for number in range(4000)]
    gc.collect()
    tracemalloc.start()
    cache = manager(4000, host and 4000, policy, max_queued_events=0)
    for number, digest in enumerate(hashes):
        run(cache, str(number), [digest])
    gc.collect()
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size / 4000 + 65 < limit  # 65: the digest itself, which was there before
    assert cache.stats().device_free_blocks == 0


def test_items_after_a_block_cost_it_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(tuple):  # type: ignore[type-arg]
        copied = 0

        def __getitem__(self, key):  # type: ignore[no-untyped-def]
            if isinstance(key, slice):
                Counted.copied += len(range(*key.indices(len(self))))
            return super().__getitem__(key)

    items = [MultimodalItem(4 * number, 2, str(number)) for number in range(50)]
    hasher = BlockHasher(4, items=items)
    monkeypatch.setattr(hasher, "_items", Counted(items))
    hasher.extend(range(200))  # type: ignore[arg-type]
    assert len(hasher.hashes) == 50
    assert Counted.copied == 0
    assert cache_utils.get_block_hash_extra_keys(0, 4, items)[0] != b""


def test_what_is_forgotten_is_freed_at_once_and_not_by_the_garbage_collector() -> None:
    cache = manager(6, 3, "write_through")
    with no_cyclic_garbage():
        for turn in range(20):
            run(cache, f"long {turn}", chain(turn % 3, 1, 2))
            cache.take_swap_step()  # its backup is done
            for name, length in (("cut", 1), ("cut again", 2)):
                cache.match_prefix(name, GivenHashes(chain(turn % 3, 1, 2)[:length], length + 1))
            for name in ("cut", "cut again"):
                cache.release(name)  # joins what the matches cut
        assert cache.stats().counters.host_evicted_blocks


def test_a_copy_that_did_not_fail_is_not_searched_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = manager(4, 4, "write_through")
    run(cache, "r", chain(1))
    step = cache.take_swap_step()
    monkeypatch.setattr(Run, "subtree", None)
    assert cache.transfer_failed(TransferResult(step.step, CacheLevel.DEVICE, CacheLevel.HOST, 1, 64, 0.1)) == []
    assert cache.stats().counters.failed_transfer_blocks == 0
