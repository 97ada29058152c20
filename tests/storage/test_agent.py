"""StorageAgent and its link over stores of values by key: seals, commits, and when a connection ends."""

import pytest

from fastdeploy_kvcache_v1.errors import StorageError
from fastdeploy_kvcache_v1.storage.base import SlotMemory, StorageFullError
from fastdeploy_kvcache_v1.storage.messages import CommitDone, QueryDone, TouchDone
from fastdeploy_kvcache_v1.storage.namespace import block_key, commit_key
from fastdeploy_kvcache_v1.storage.seal import TRAILER_BYTES, is_sealed
from tests.storage.machines import BLOCKS, HASHES, LIMIT_S, HostMemory
from tests.storage.values import DIGEST, VALUE_BYTES, namespace, sealed

SOON = pytest.approx(0, abs=LIMIT_S)
KEYS = [block_key(each, 0) for each in HASHES]


@pytest.fixture(params=["file", "mooncake stand-in"])
def machine(request, start_machine):
    return start_machine(request.param)


def flipped(value):
    value[100] ^= 1
    return value


@pytest.mark.parametrize(
    ("bytes_", "what"),
    [
        (lambda: flipped(sealed(KEYS[1])), "a flipped bit"),
        (lambda: sealed(KEYS[0]), "another block"),
        (lambda: sealed(KEYS[1], namespace(model="n").digest), "a block of another namespace"),
        (lambda: memoryview(bytearray(VALUE_BYTES)), "nothing"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_a_block_with_wrong_bytes_is_a_miss_and_is_forgotten(machine, bytes_, what):
    server = machine()
    server.store(*BLOCKS)
    backend = server.connect(namespace())
    backend.remove([KEYS[1]])
    assert backend.put([KEYS[1]], [bytes_()]) == 1
    (done,) = server.load(*BLOCKS)
    assert (done.num_arrived, done.is_damaged, done.num_bytes, done.error) == (1, True, VALUE_BYTES, None)
    assert server.memory[0].refilled == [(7,)]
    assert server.holds(0)
    assert backend.count_stored(KEYS[1:2]) == 0
    (done,) = server.load(*BLOCKS)
    assert (done.num_arrived, done.is_damaged) == (1, False)
    backend.close()


def test_all_blocks_of_a_load_that_are_damaged_are_forgotten(machine):
    server = machine()
    server.store(*BLOCKS)
    backend = server.connect(namespace())
    for number in (0, 2):
        backend.remove([KEYS[number]])
        assert backend.put([KEYS[number]], [flipped(sealed(KEYS[number]))]) == 1
    server.faults["remove_damaged"] = (told := []).extend
    (done,) = server.load(*BLOCKS)
    assert (done.num_arrived, done.is_damaged) == (0, True)
    assert told == [KEYS[0], KEYS[2]]
    assert [backend.count_stored([key]) for key in KEYS[:3]] == [0, 1, 0]
    backend.close()


def test_with_several_ranks_a_block_is_stored_once_it_is_committed(machine):
    server = machine(ranks=2)
    server.store(*BLOCKS)
    assert server.query(*BLOCKS).num_stored == 0
    assert server.commit(0, 1, 2) == CommitDone("s")
    assert server.query(*BLOCKS) == QueryDone("q", 3, SOON)
    backend = server.connect(namespace())
    markers = [commit_key(each) for each in HASHES]
    assert backend.count_stored(markers) == 3
    marker = memoryview(bytearray(TRAILER_BYTES))
    assert backend.get(markers[:1], [marker]) == 1
    assert is_sealed(marker, markers[0], namespace=DIGEST)
    backend.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_parts_of_blocks_that_are_in_use_are_touched(machine, ranks):
    server = machine(ranks=ranks)
    touched = []
    server.faults["touch"] = lambda keys: touched.extend(keys)
    server.store(0)
    server.commit(0)
    server.link.touch("t", HASHES[:2])
    assert server.answer() == TouchDone("t", 1)
    parts = [[commit_key(each), block_key(each, 0), block_key(each, 1)] for each in HASHES[:2]]
    assert touched == (KEYS[:2] if ranks == 1 else parts[0] + parts[1])


def test_blocks_that_have_no_room_are_told_and_the_connection_stays(machine):
    server = machine()
    server.fails(StorageFullError(1, 3), "store")
    (done,) = server.store(*BLOCKS)
    assert (done.num_written, done.num_refused, done.num_bytes, done.error) == (1, 3, VALUE_BYTES, None)
    assert server.log == ["open"]


def test_what_failed_is_answered_after_its_connection_is_closed(machine):
    """Only then no byte of it can arrive any more."""
    server = machine()
    server.fails("timed out", "load")
    server.load(*BLOCKS)
    assert server.log == ["open", "close"]
    server.works()
    server.load(*BLOCKS)
    assert server.log == ["open", "close", "open"]


def test_a_connection_is_of_one_namespace_and_is_closed_in_the_end(machine):
    server = machine()
    server.query(0)
    server.use_namespace(weight_epoch="1")
    server.query(0)
    assert server.log == ["open", "close", "open"]
    server.load(0)
    assert server.agents[0].close()
    server.link.close()
    assert server.log == ["open", "close", "open", "open", "close", "close"]


def test_memory_is_registered_with_each_new_connection(machine):
    server = machine()
    (agent,), (slots,) = server.agents, server.memory
    memory = SlotMemory(memoryview(bytearray(8 * VALUE_BYTES)), VALUE_BYTES)
    agent.use(slots, memory)
    server.faults["register"] = (registered := []).append
    server.store(0)
    server.fails("the store is down", "store")
    server.store(0)
    del server.faults["put"]
    server.store(0)
    other = SlotMemory(memoryview(bytearray(8 * VALUE_BYTES)), VALUE_BYTES)
    agent.use(HostMemory(), other)
    server.store(0)
    assert registered == [memory, memory, other]


def test_memory_that_cannot_be_registered_leaves_no_connection(machine):
    server = machine()
    server.agents[0].use(server.memory[0], SlotMemory(memoryview(bytearray(VALUE_BYTES)), VALUE_BYTES))

    def refuse(_):
        raise StorageError("no such memory")

    server.faults["register"] = refuse
    (done,) = server.store(0)
    assert (done.error, server.log) == ("no such memory", ["open", "close"])
    server.works()
    assert [done.num_written for done in server.store(0)] == [1]
