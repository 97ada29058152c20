"""Each invariant is there to be broken once: the checks must notice, and say what."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from fastdeploy_kvcache_v1.contract.messages import CacheLevel, DeviceSlot
from fastdeploy_kvcache_v1.errors import InvariantError
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.request_state import RequestState
from fastdeploy_kvcache_v1.scheduler.run import DEVICE, WIDTH, HostCopy, Run, RunQueue

from .scenario import block, manager, prompt, run, start


def request(cache: CacheManager) -> RequestState:
    return cache._requests["r"]


def waiting(cache: CacheManager) -> RequestState:
    return cache._requests["waiting"]


def top(cache: CacheManager) -> Run:
    """`a` and `b`."""
    found = cache._tree.root.children.get(block("a"))
    assert found is not None
    return found


def leaf(cache: CacheManager) -> Run:
    """`c`, in cells of its own."""
    return request(cache).leaf


def unused(cache: CacheManager) -> Run:
    found = cache._tree.root.children.get(block("x"))
    assert found is not None
    return found


def host_copy(run: Run) -> HostCopy:
    assert run.host is not None
    return run.host


def detach(cache: CacheManager, run: Run) -> None:
    """Take it out of the tree without telling the queues."""
    run.leave_parent()
    run.detached = True
    cache._residency._detached[run] = None


DAMAGES: dict[str, Callable[[CacheManager], object]] = {
    # The requests
    "waiting miscounts its cached blocks": lambda cache: setattr(waiting(cache), "num_cached", 1),
    "waiting has a block table before it was admitted": lambda cache: waiting(cache).tail.append(
        request(cache).tail.pop()
    ),
    "r reads blocks off the device": lambda cache: cache._device_pool.free(leaf(cache).leave_device()),
    "r owns slots of blocks that it does not have": lambda cache: request(cache).duplicates.update(
        {3: request(cache).tail.pop()}
    ),
    "an ended request is still listed as admitted": lambda cache: cache._requests._admitted.update(gone=request(cache)),
    "a run is pinned 3 times by 2 requests": lambda cache: setattr(top(cache), "pins", 3),
    # The slots
    "device pool: a slot has two owners": lambda cache: request(cache).tail.append(request(cache).tail[-1]),
    "device pool: 1 slots leaked": lambda cache: request(cache).tail.pop(),
    "device pool: a slot is used that is free": lambda cache: cache._device_pool.free(request(cache).tail[-1:]),
    "host pool: a slot is used that is free": lambda cache: cache._host_pool.free(unused(cache).host_slots),
    "device pool: a slot is on the free list twice": lambda cache: cache._device_pool._free.append(
        cache._device_pool._free[0]
    ),
    "device pool: slots both free and allocated": lambda cache: cache._device_pool._free.append(0),
    "device pool: slots lost or out of range": lambda cache: cache._device_pool._free.pop(),
    "host pool: 1 slots leaked": lambda cache: cache._host_pool.allocate(1),
    # The tree
    "a run is not its parent's child": lambda cache: top(cache).cells.__setitem__(0, block("x")),
    "a run miscounts its children on the device": lambda cache: setattr(top(cache), "num_device_children", 0),
    "a run is pinned less than its children": lambda cache: setattr(top(cache), "pins", 0),
    "a run is hit more often than the one above it": lambda cache: setattr(leaf(cache), "hits", 1),
    "a device block hangs below a block that is not": lambda cache: top(cache).leave_device(),
    "a detached run is findable": lambda cache: setattr(leaf(cache), "detached", True),
    "one block is in the tree twice": lambda cache: top(cache).cells.__setitem__(WIDTH, block("x")),
    # The cells of a run
    "a run has no blocks": lambda cache: setattr(leaf(cache), "end", 0),
    "the cells of a run do not go on from its parent's": lambda cache: setattr(leaf(cache), "start", -1),
    "cells have blocks that belong to no run": lambda cache: leaf(cache).cells.extend([block("y"), 0, 0]),
    # The tiers of a run
    "a run is in no tier": lambda cache: (leaf(cache).leave_device(), setattr(leaf(cache), "host", None)),
    "a host copy belongs to another run": lambda cache: setattr(host_copy(leaf(cache)), "run", unused(cache)),
    "an open copy has no host slots": lambda cache: setattr(leaf(cache), "host", None),
    "a swap-in has no device slots": lambda cache: (
        leaf(cache).leave_device(),
        setattr(leaf(cache), "open", CacheLevel.DEVICE),
    ),
    # Detached runs
    "a detached run has no user left": lambda cache: detach(cache, unused(cache)),
    "a detached run is queued": lambda cache: (
        detach(cache, leaf(cache)),
        cache._residency.device_order.use(leaf(cache)),
    ),
    # Queues and counts
    "the device queue is torn": lambda cache: setattr(unused(cache), "older", unused(cache)),
    "the host queue is torn": lambda cache: setattr(host_copy(unused(cache)), "older", host_copy(leaf(cache))),
    "the device queue holds runs that are not in its tier": lambda cache: cache._residency.device_order.use(
        Run.of([block("y")], [DeviceSlot(0)])
    ),
    "the host queue holds a run twice": lambda cache: cache._residency.host_order.use(HostCopy(unused(cache))),
    "the device queue misses runs": lambda cache: unused(cache).leave_queue(),
    "the host queue misses runs": lambda cache: host_copy(unused(cache)).leave_queue(),
    "a run of the device tier is in a queue of another tier": lambda cache: RunQueue().touch(top(cache)),
    "the queue of host duplicates differs": lambda cache: setattr(host_copy(unused(cache)), "is_duplicate", True),
    "1 device blocks are evictable, 9 are counted": lambda cache: setattr(cache._residency, "num_device_evictable", 9),
    # Copies
    "open transfers and runs disagree": lambda cache: cache._residency._open.clear(),
    "an open copy reads a device slot outside the pool": lambda cache: leaf(cache).cells.__setitem__(DEVICE, 8),
}


@pytest.mark.parametrize("expected", DAMAGES)
def test_check_names_the_damage(expected: str) -> None:
    """Before: `ab` and `c` in use, `x` not, all on both tiers, the copy of `c` still open."""
    cache = manager(8, 8, "write_through")
    run(cache, "ab!")
    run(cache, "x!")
    start(cache, "abcde!", "r")
    cache.take_swap_step()
    cache.commit("r", 3)
    cache.match_prefix("waiting", prompt("abc!"))
    cache.check()
    DAMAGES[expected](cache)
    with pytest.raises(InvariantError, match=re.escape(expected)) as caught:
        cache.check()
    with pytest.raises(InvariantError, match=re.escape(str(caught.value))):
        cache.check_idle()


def test_idle_means_that_nothing_is_held() -> None:
    cache = manager(4)
    cache.check_idle()
    start(cache, "ab!")
    with pytest.raises(InvariantError, match="never ended: ab!"):
        cache.check_idle()
    cache.finish("ab!")
    cache.check_idle()
    slots = cache.lend(1)
    with pytest.raises(InvariantError, match="device slots leaked"):
        cache.check_idle()
    assert isinstance(slots, list)
    cache.take_back(slots)


def test_idle_means_that_forgotten_blocks_have_been_let_go() -> None:
    cache = manager(4, 4, "write_through")
    run(cache, "ab!")  # its backup is open
    cache.reset_cache()
    with pytest.raises(InvariantError, match="take the swap step first"):
        cache.check_idle()
    cache.take_swap_step()
    cache.check_idle()
