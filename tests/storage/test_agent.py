"""Link and agents over real sockets, real files and memory that can be looked at: what moves, and what happens when
the store does not work.
"""

import os
import queue
import threading
from functools import partial

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage import agent as agent_module
from fastdeploy_kvcache_v1.storage import lane_agent
from fastdeploy_kvcache_v1.storage.agent import StorageAgent
from fastdeploy_kvcache_v1.storage.base import SlotMemory, StorageFullError
from fastdeploy_kvcache_v1.storage.engine.link import StorageLink
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.messages import LoadBlocks, LoadDone, QueryDone, StoreBlocks, StoreDone, UseNamespace
from fastdeploy_kvcache_v1.storage.namespace import block_key, commit_key
from tests.storage.values import BLOCK_BYTES, VALUE_BYTES, block_hash, namespace

LIMIT_S = 20.0
HASHES = tuple(block_hash(number) for number in range(4))


class Memory:
    """Host slots of one rank."""

    def __init__(self, rank=0):
        self.rank = rank
        self.slots = [bytearray(VALUE_BYTES) for _ in range(8)]

    def __call__(self, slot):
        return memoryview(self.slots[slot])

    def fill(self, slot, number):
        self.slots[slot][:BLOCK_BYTES] = bytes([16 * self.rank + number + 1]) * BLOCK_BYTES

    def holds(self, slot, number):
        return self.slots[slot][:BLOCK_BYTES] == bytes([16 * self.rank + number + 1]) * BLOCK_BYTES


class Machine:
    """A link and the agents of its ranks, as threads of this process."""

    def __init__(self, directory, sockets, ranks=1, wrap=lambda backend: backend, open_store=None):
        self.answers = queue.SimpleQueue()

        def open_backend(space):
            if open_store is not None:
                return open_store(space)
            return wrap(FileBackend(directory, space, capacity_bytes=1 << 30))

        commands = [f"ipc://{sockets}/commands{rank}" for rank in range(ranks)]
        results = f"ipc://{sockets}/results"
        self.link = StorageLink(commands, results, open_backend=open_backend)
        self.memory = [Memory(rank) for rank in range(ranks)]
        self.agents = []
        for rank, address in enumerate(commands):
            self.agents.append(StorageAgent(address, results, rank=rank, open_backend=open_backend))
            self.agents[-1].use(self.memory[rank])
        while not self.link.is_connected(100):
            pass
        self.link.listen(self.answers.put)
        self.link.send(UseNamespace(namespace()))

    def ask(self, command):
        """Returns the answers of all ranks, in order of ranks."""
        self.link.send(command)
        return sorted((self.answer() for _ in self.agents), key=lambda answer: answer.rank)

    def answer(self):
        return self.answers.get(timeout=LIMIT_S)

    def num_stored(self, hashes):
        self.link.query("q", hashes)
        return self.answer()

    def close(self):
        for agent in self.agents:
            agent.close()
        self.link.close()


@pytest.fixture
def machine(tmp_path):
    machines = []

    def start(**options):
        sockets = tmp_path / f"sockets{len(machines)}"
        sockets.mkdir()
        machines.append(Machine(tmp_path / "kv", sockets, **options))
        return machines[-1]

    yield start
    for each in machines:
        each.close()


def store(machine, numbers=range(4)):
    for memory in machine.memory:
        for number in numbers:
            memory.fill(number, number)
    hashes = tuple(HASHES[number] for number in numbers)
    return machine.ask(StoreBlocks("s", hashes, tuple(numbers)))


def test_what_one_server_stores_another_one_loads(machine):
    first, second = machine(), machine()
    (done,) = store(first)
    assert (done.store_id, done.rank, done.num_written, done.error) == ("s", 0, 4, None)
    assert done.num_bytes == 4 * VALUE_BYTES
    assert second.num_stored(HASHES).num_stored == 4
    (done,) = second.ask(LoadBlocks("l", HASHES, (7, 6, 5, 4)))
    assert (done.load_id, done.rank, done.num_arrived, done.is_damaged, done.error) == ("l", 0, 4, False, None)
    assert all(second.memory[0].holds(7 - number, number) for number in range(4))


def test_loads_end_at_the_first_block_that_is_missing(machine):
    server = machine()
    store(server, (0, 1, 3))
    assert server.num_stored(HASHES).num_stored == 2
    (done,) = server.ask(LoadBlocks("l", HASHES, (4, 5, 6, 7)))
    assert (done.num_arrived, done.is_damaged, done.error) == (2, False, None)


def test_a_damaged_block_is_a_miss_and_is_forgotten(machine, tmp_path):
    server = machine()
    store(server)
    (path,) = (tmp_path / "kv").rglob(block_key(HASHES[1], 0))
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    (done,) = server.ask(LoadBlocks("l", HASHES, (4, 5, 6, 7)))
    assert (done.num_arrived, done.is_damaged) == (1, True)
    assert not path.exists()
    (done,) = server.ask(LoadBlocks("l", HASHES, (4, 5, 6, 7)))
    assert (done.num_arrived, done.is_damaged) == (1, False)


def test_a_block_under_the_name_of_another_one_is_damaged(machine, tmp_path):
    server = machine()
    store(server)
    (path,) = (tmp_path / "kv").rglob(block_key(HASHES[0], 0))
    (other,) = (tmp_path / "kv").rglob(block_key(HASHES[1], 0))
    path.write_bytes(other.read_bytes())
    (done,) = server.ask(LoadBlocks("l", HASHES[:1], (4,)))
    assert (done.num_arrived, done.is_damaged) == (0, True)


def test_a_block_that_was_moved_to_another_namespace_is_damaged(machine, tmp_path):
    first, second = machine(), machine()
    store(first)
    other = namespace(model="n")
    second.link.send(UseNamespace(other))
    assert second.num_stored(HASHES).num_stored == 0, "which makes the directory"
    for path in list((tmp_path / "kv" / namespace().digest).glob("??/*")):
        moved = tmp_path / "kv" / other.digest / path.parent.name / path.name
        moved.parent.mkdir(exist_ok=True)
        path.rename(moved)
    assert second.num_stored(HASHES).num_stored == 4
    (done,) = second.ask(LoadBlocks("l", HASHES, (4, 5, 6, 7)))
    assert (done.num_arrived, done.is_damaged) == (0, True)


def test_with_several_ranks_a_block_is_stored_once_it_is_committed(machine, tmp_path):
    server = machine(ranks=2)
    assert [done.num_written for done in store(server)] == [4, 4]
    assert server.num_stored(HASHES).num_stored == 0
    server.link.commit(HASHES[:3])
    assert server.answer() == QueryDone("", 3, seconds=pytest.approx(0, abs=LIMIT_S))
    assert server.num_stored(HASHES).num_stored == 3
    assert list((tmp_path / "kv").rglob(commit_key(HASHES[0])))
    for done in server.ask(LoadBlocks("l", HASHES, (4, 5, 6, 7))):
        assert done.num_arrived == 4
    assert all(memory.holds(4 + number, number) for memory in server.memory for number in range(4))


def test_a_new_namespace_has_none_of_the_old_blocks(machine):
    server = machine()
    store(server)
    server.link.send(UseNamespace(namespace(weight_epoch="1")))
    assert server.num_stored(HASHES).num_stored == 0
    (done,) = server.ask(LoadBlocks("l", HASHES, (4, 5, 6, 7)))
    assert done.num_arrived == 0
    server.link.send(UseNamespace(namespace()))
    assert server.num_stored(HASHES).num_stored == 4


class Faulty:
    """A backend in front of another one: fails, hangs, or writes late, when told so."""

    def __init__(self, inner):
        self.inner = inner
        self.may_write_late = True
        self.namespace_digest = inner.namespace_digest

    faults: dict
    hang = None
    closed = 0

    def __getattr__(self, name):
        def call(*given):
            fault = Faulty.faults.get(name)
            if fault is not None:
                fault(*given)
            return getattr(self.inner, name)(*given)

        return call

    def close(self):
        Faulty.closed += 1
        self.inner.close()


@pytest.fixture
def faults():
    Faulty.faults = {}
    Faulty.closed = 0
    return Faulty.faults


def fail(error):
    def fault(*_):
        raise error

    return fault


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StorageError("the store is down"), "the store is down"),
        (ConfigError("wrong directory"), "wrong directory"),
        (ValueError("a bug"), "ValueError('a bug')"),
        (OSError(5, "Input/output error"), "OSError(5, 'Input/output error')"),
    ],
)
def test_every_command_is_answered_whatever_the_store_raises(machine, faults, error, told):
    server = machine(wrap=Faulty)
    faults.update(dict.fromkeys(("get", "put", "count_stored"), fail(error)))
    (done,) = store(server)
    assert done == StoreDone("s", 0, 0, error=told)
    (done,) = server.ask(LoadBlocks("l", HASHES, (4, 5, 6, 7)))
    assert done == LoadDone("l", 0, 0, error=told)
    assert server.num_stored(HASHES) == QueryDone("q", 0, error=told)
    faults.clear()
    (done,) = store(server)
    assert done.num_written == 4


def test_a_load_that_failed_is_answered_after_its_connection_is_closed(machine, faults):
    """Only then no byte of it can arrive any more."""
    server = machine(wrap=Faulty)
    store(server)
    faults["get"] = fail(StorageError("timed out"))
    before = Faulty.closed
    server.ask(LoadBlocks("l", HASHES, (4, 5, 6, 7)))
    assert Faulty.closed == before + 1


def test_a_store_that_hangs_stops_neither_loads_nor_questions(machine, faults):
    server = machine(wrap=Faulty)
    store(server)
    released = threading.Event()
    faults["put"] = lambda *_: released.wait(LIMIT_S)
    server.link.send(StoreBlocks("hangs", HASHES, (0, 1, 2, 3)))
    (done,) = server.ask(LoadBlocks("l", HASHES, (4, 5, 6, 7)))
    assert done.num_arrived == 4
    assert server.num_stored(HASHES).num_stored == 4
    released.set()
    assert server.answer().store_id == "hangs"


def test_an_agent_whose_store_hangs_says_that_its_slots_are_in_use(machine, faults, monkeypatch):
    monkeypatch.setattr(lane_agent, "STOP_TIMEOUT_S", 0.05)
    server = machine(wrap=Faulty)
    store(server)
    reached, released = threading.Event(), threading.Event()

    def hang(*_):
        reached.set()
        released.wait(LIMIT_S)

    faults["get"] = hang
    server.link.send(LoadBlocks("hangs", HASHES, (4, 5, 6, 7)))
    assert reached.wait(LIMIT_S)
    (agent,) = server.agents
    assert not agent.close()
    assert not agent.close()
    released.set()
    monkeypatch.undo()
    assert agent.close()


def test_blocks_that_have_no_room_are_told_and_the_connection_stays(machine, faults):
    server = machine(wrap=Faulty)
    store(server, (0,))
    before = Faulty.closed
    faults["put"] = fail(StorageFullError(1, 3))
    (done,) = store(server)
    assert (done.num_written, done.num_refused, done.num_bytes, done.error) == (1, 3, VALUE_BYTES, None)
    assert Faulty.closed == before


def test_memory_is_registered_with_each_new_connection(machine, faults):
    server = machine(wrap=Faulty)
    memory = SlotMemory(memoryview(bytearray(8 * VALUE_BYTES)), VALUE_BYTES)
    server.agents[0].use(server.memory[0], memory)
    registered = []
    faults["register"] = registered.append
    store(server)
    assert registered == [memory]
    faults["put"] = fail(StorageError("the store is down"))
    store(server)
    faults.pop("put")
    store(server)
    assert registered == [memory, memory]


def test_memory_that_cannot_be_registered_is_an_error_and_leaves_no_connection(machine, faults):
    server = machine(wrap=Faulty)
    server.agents[0].use(server.memory[0], SlotMemory(memoryview(bytearray(VALUE_BYTES)), VALUE_BYTES))
    faults["register"] = fail(StorageError("no such memory"))
    (done,) = store(server)
    assert (done.error, Faulty.closed) == ("no such memory", 1)
    faults.clear()
    (done,) = store(server)
    assert done.num_written == 4


def test_an_idle_agent_ends_at_once(machine):
    (agent,) = machine().agents
    assert agent.close()
    assert agent.close()


def test_slots_without_memory_are_an_error_and_not_a_crash(machine, tmp_path):
    server = machine()
    server.agents[0].use(partial(agent_module._no_slot))
    (done,) = server.ask(LoadBlocks("l", HASHES, (4, 5, 6, 7)))
    assert "has no memory" in done.error


def test_an_engine_whose_workers_are_gone_does_not_wait_for_them(machine):
    server = machine()
    (agent,) = server.agents
    assert agent.close()
    for number in range(3000):
        server.link.send(LoadBlocks(f"l{number}", HASHES, (4, 5, 6, 7)))


def test_blocks_in_use_elsewhere_are_marked_as_used(machine, tmp_path):
    server = machine(ranks=2)
    store(server)
    server.link.commit(HASHES)
    server.answer()
    paths = [path for path in (tmp_path / "kv").rglob("*") if path.is_file() and HASHES[0].hex() in path.name]
    assert len(paths) == 3
    for path in paths:
        os.utime(path, (1, 1))
    server.link.touch(HASHES)
    assert server.answer().error is None
    assert all(path.stat().st_mtime > 1e9 for path in paths)
