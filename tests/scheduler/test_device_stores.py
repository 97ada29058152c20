"""Device blocks that storage reads: their slots stay as they are until that has ended, whatever their blocks do."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.errors import BlockPoolError, CacheStateError, PoolInUseError
from fastdeploy_kvcache_v1.metadata import CacheLevel, NoSpace, StoreSource
from fastdeploy_kvcache_v1.scheduler.block_pool import DeviceBlockPool
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import BlockHasher, GivenHashes, MultimodalItem

from .scenario import block, cached, fail, manager, prompt, run, start

NOTHING = StoreSource((), ())


def begin(cache: CacheManager, text: str, first: int = 0, name: str = "store") -> StoreSource:
    source = cache.begin_device_store(name, prompt(text).hashes, first)
    cache.check()
    return source


def end(cache: CacheManager, name: str = "store") -> None:
    cache.end_store(name)
    cache.check()


def test_a_store_names_blocks_and_slots_as_far_as_they_are_on_the_device() -> None:
    cache = manager(8)
    start(cache, "abc!")
    table = cache.block_table("abc!")
    cache.take_swap_step()
    cache.commit("abc!", 3)
    cache.finish("abc!")
    assert begin(cache, "abcd", 1) == StoreSource((block("ab"), block("abc")), tuple(table[1:]))
    assert begin(cache, "abcd", 3, "nothing") == NOTHING
    with pytest.raises(CacheStateError, match="store nothing is unknown"):
        cache.end_store("nothing")
    with pytest.raises(CacheStateError, match="store store has begun"):
        begin(cache, "abc")
    end(cache)
    cache.check_idle()


def test_a_slot_is_given_to_nobody_else_while_it_is_read_although_its_block_is_evicted() -> None:
    cache = manager(4)
    run(cache, "ab!")
    held = set(begin(cache, "ab").slots)
    assert cache.num_available_device_blocks == 2
    cache.match_prefix("big", prompt("wxyz!"))
    assert isinstance(cache.allocate("big", 3), NoSpace)
    assert not isinstance(cache.allocate("big", 2), NoSpace)
    assert not held & set(cache.block_table("big"))
    cache.check()
    cache.release("big")
    run(cache, "uv!")
    run(cache, "wx!")
    assert not held & {node.device_slot for node in nodes(cache, "wx")}
    end(cache)
    assert cache.num_available_device_blocks == 4
    cache.check_idle()


def nodes(cache: CacheManager, text: str):
    cache.match_prefix("probe", prompt(text + "!"))
    found = cache.nodes("probe")
    cache.release("probe")
    return found


def test_blocks_that_are_evicted_while_they_are_read_free_their_slots_at_the_end() -> None:
    cache = manager(4, 4, "write_back")
    run(cache, "ab!")
    held = set(begin(cache, "ab").slots)
    cache.match_prefix("r", prompt("wxyz!"))
    cache.allocate("r", 2)
    cache.take_swap_step()
    assert isinstance(cache.allocate("r", 3), NoSpace)
    cache.finish("r")
    cache.resize_device_pool(8)
    start(cache, "uvwxyz!")  # six slots, and "ab" is still there
    assert not held & set(cache.block_table("uvwxyz!"))
    cache.take_swap_step()
    cache.finish("uvwxyz!")
    cache.check()
    end(cache)
    cache.check_idle()


def test_two_readers_of_a_slot_end_one_by_one() -> None:
    cache = manager(2)
    run(cache, "ab!")
    begin(cache, "ab", name="one")
    begin(cache, "a", name="two")
    cache.reset_cache()
    cache.check()
    assert cache.stats().device_free_blocks == 0
    assert cache.stats().device_cached_blocks == 0
    end(cache, "one")
    assert cache.stats().device_free_blocks == 1
    end(cache, "two")
    assert cache.stats().device_free_blocks == 2
    cache.check_idle()


@pytest.mark.parametrize("force", [False, True])
def test_a_reset_leaves_the_bytes_of_a_store_alone(force: bool) -> None:
    cache = manager(4)
    run(cache, "ab!")
    start(cache, "abc!")  # goes on using what is read, unless it is forced out
    held = set(begin(cache, "ab").slots)
    cache.reset_cache(force=force)
    cache.check()
    assert cached(cache, "ab") == []
    if not force:
        cache.take_swap_step()
        cache.finish("abc!")
    cache.check()
    start(cache, "xy!")
    assert not held & set(cache.block_table("xy!"))
    cache.take_swap_step()
    cache.finish("xy!")
    end(cache)
    cache.take_swap_step()
    cache.check_idle()


def test_what_waits_for_a_copy_that_was_not_told_is_not_read() -> None:
    cache = manager(4, 4, "write_back")
    run(cache, "ab!")
    run(cache, "wxyz!")  # "ab" is on the host now
    cache.take_swap_step()
    assert begin(cache, "ab") == NOTHING
    start(cache, "ab!")
    assert begin(cache, "ab") == NOTHING, "its swap-in was not handed over"
    step = cache.take_swap_step()
    assert begin(cache, "ab").slots == step.swap_in.target_slots
    fail(cache, step, CacheLevel.DEVICE, step.swap_in.target_slots)
    cache.preempt("ab!")
    cache.check()
    end(cache)
    cache.check_idle()


def test_the_device_tier_does_not_shrink_below_what_is_read() -> None:
    cache = manager(4)
    run(cache, "abcd!")
    begin(cache, "abcd")
    with pytest.raises(PoolInUseError, match="complete their loads and stores"):
        cache.resize_device_pool(2)
    cache.check()
    end(cache)
    cache.resize_device_pool(2)
    cache.check()


def test_a_held_slot_is_not_given_back_twice() -> None:
    pool = DeviceBlockPool(4)
    slots = pool.allocate(3)
    pool.hold(slots[:2])
    pool.free(slots)
    assert (pool.num_free, pool.num_held, pool.num_ownerless) == (2, 0, 2)
    with pytest.raises(BlockPoolError, match="given back already"):
        pool.free(slots[:1])
    pool.check_owners([])
    pool.let_go(slots[:2])
    assert pool.num_free == 4
    pool.check_owners([])


def test_what_is_on_the_device_is_counted_from_the_first_block_on() -> None:
    cache = manager(4, 8, "write_back")
    run(cache, "abcd!")
    run(cache, "xy!")  # evicts "cd" to the host
    cache.take_swap_step()
    hashes = prompt("abcde").hashes
    assert cache.count_cached(hashes) == 4
    assert cache.count_on_device(hashes) == 2
    assert cache.count_on_device(prompt("zz").hashes) == 0


def test_random_stores_beside_random_requests() -> None:
    rng = random.Random(1)
    cache = manager(12, 8, "write_back")
    stores: dict[str, StoreSource] = {}
    for number in range(2000):
        text = "".join(rng.choice("ab") for _ in range(rng.randrange(2, 7))) + "!"
        choice = rng.random()
        if choice < 0.5:
            cache.match_prefix(text, prompt(text))
            if isinstance(cache.allocate(text, len(text) - 1), NoSpace):
                cache.release(text)
            else:
                table = set(cache.block_table(text))
                cache.take_swap_step()
                cache.commit(text, len(text) - 1)
                others = {slot for source in stores.values() for slot in source.slots}
                shared = {node.device_slot for node in cache.nodes(text)}
                assert not (table - shared) & others, "nobody writes what is read"
                cache.finish(text)
        elif choice < 0.7:
            source = cache.begin_device_store(f"s{number}", prompt(text).hashes, rng.randrange(2))
            if source.slots:
                stores[f"s{number}"] = source
        elif choice < 0.98 and stores:
            name = rng.choice(list(stores))
            del stores[name]
            cache.end_store(name)
        elif choice > 0.99:
            cache.reset_cache(force=rng.random() < 0.5)
        cache.check()
    for name in stores:
        cache.end_store(name)
    cache.take_swap_step()
    cache.check_idle()


@pytest.mark.parametrize(
    ("options", "plain"),
    [
        ({}, 4),
        ({"salt": b"tenant"}, 0),
        ({"lora": "adapter"}, 0),
        ({"items": [MultimodalItem(9, 2, "image")]}, 2),
        ({"items": [MultimodalItem(0, 2, "image")]}, 0),
        ({"items": [MultimodalItem(99, 2, "image")]}, 4),
    ],
)
def test_blocks_are_plain_as_far_as_token_ids_alone_decide_their_names(options, plain) -> None:
    hasher = BlockHasher(4, **options)
    hasher.extend(range(17))
    assert hasher.num_plain_blocks == plain
    plainly = BlockHasher(4)
    plainly.extend(range(17))
    assert hasher.hashes[:plain] == plainly.hashes[:plain]
    assert not set(hasher.hashes[plain:]) & set(plainly.hashes)


def test_of_given_hashes_nobody_knows_what_decided_them() -> None:
    assert GivenHashes([block("a")], 2).num_plain_blocks == 0
