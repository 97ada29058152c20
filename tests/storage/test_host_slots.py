"""Host slots of several ranks as places of values, and whose bytes are compared."""

import mmap
import os
import threading

import pytest

from fastdeploy_kvcache_v1.storage import host_slots
from fastdeploy_kvcache_v1.storage.host_slots import COMPARED_BLOCKS, HostSlots, map_pages
from fastdeploy_kvcache_v1.storage.messages import MappedSlots, Start, StoreBlocks
from fastdeploy_kvcache_v1.storage.namespace import block_key
from fastdeploy_kvcache_v1.storage.seal import TRAILER_BYTES
from tests.storage.mapped_pages import mapped_bytes, needs_mapping_ahead
from tests.storage.values import block_hash

NUM_SLOTS, SLOT_BYTES = 2 * COMPARED_BLOCKS, mmap.PAGESIZE


@pytest.fixture
def slots():
    """`slots(ranks=2, parts=1)`: over memory of its own."""
    files = []

    def slots(ranks, parts):
        mapped = []
        for _ in range(ranks):
            files.append(os.memfd_create("test-slots"))
            os.ftruncate(files[-1], NUM_SLOTS * SLOT_BYTES)
            mapped.append(MappedSlots(files[-1], NUM_SLOTS, SLOT_BYTES))
        return HostSlots(Start({}, parts, tuple(mapped), -1))

    yield slots
    for file in files:
        os.close(file)


def store(*numbers):
    return StoreBlocks("s", tuple(map(block_hash, numbers)), numbers)


def test_a_value_is_in_the_slot_of_every_rank_that_holds_its_part(slots):
    made = slots(ranks=4, parts=2)
    for rank, memory in enumerate(made.memories):
        memory.view[:] = bytes([rank]) * len(memory.view)
        memory.view[3 * SLOT_BYTES : 4 * SLOT_BYTES] = bytes([10 + rank]) * SLOT_BYTES
    values = made.values([block_hash(1), block_hash(2)], [3, 5], range(2))
    assert [value.key for value in values] == [block_key(block_hash(n), part) for n in (1, 2) for part in range(2)]
    assert [[(place[0], place[-1], len(place)) for place in value.places] for value in values] == [
        [(each, each, SLOT_BYTES) for each in ranks] for ranks in ((10, 11), (12, 13), (0, 1), (2, 3))
    ]


@pytest.mark.parametrize(("number", "is_compared"), [(0, True), (COMPARED_BLOCKS - 1, True), (COMPARED_BLOCKS, False)])
def test_ranks_are_compared_in_the_first_blocks_alone(slots, number, is_compared):
    made = slots(ranks=2, parts=1)
    made.memories[1].view[number * SLOT_BYTES] = 1
    middle = COMPARED_BLOCKS // 2
    commands = store(*range(middle)), store(*range(middle, NUM_SLOTS))
    assert any(made.ranks_differ(command) for command in commands) == is_compared


def test_ranks_may_differ_in_seals(slots):
    """One rank's slot is sealed, and the others keep what an earlier block left there."""
    made = slots(ranks=2, parts=1)
    seal = SLOT_BYTES - TRAILER_BYTES
    made.memories[1].view[seal:SLOT_BYTES] = b"s" * TRAILER_BYTES
    assert not made.ranks_differ(store(0))
    made.memories[1].view[SLOT_BYTES + seal - 1] = 1
    assert made.ranks_differ(store(1))


def test_ranks_with_parts_of_their_own_are_not_compared(slots):
    made = slots(ranks=2, parts=2)
    made.memories[1].view[0] = 1
    assert not made.ranks_differ(store(0, 1))


@needs_mapping_ahead
def test_every_page_is_mapped_stretch_by_stretch(slots, monkeypatch):
    monkeypatch.setattr(host_slots, "STRETCH", 3 * mmap.PAGESIZE)  # the last one is shorter
    made = slots(ranks=2, parts=2)
    before = mapped_bytes("test-slots")
    priorities = []

    def run():  # on a thread that ends with it: it has the least priority from then on
        map_pages(made.memories)
        priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert mapped_bytes("test-slots") - before == 2 * NUM_SLOTS * SLOT_BYTES
    assert priorities == [host_slots.LEAST_PRIORITY]
