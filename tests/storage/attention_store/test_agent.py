"""Link and agents over real sockets, the stand-in SDK and memory that can be looked at."""

import gc
import queue
import threading
import time
import weakref
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import StorageError
from fastdeploy_kvcache_v1.storage import lane_agent
from fastdeploy_kvcache_v1.storage.attention_store import agent as agent_module
from fastdeploy_kvcache_v1.storage.attention_store.agent import NUM_LANES, AttentionStoreAgent
from fastdeploy_kvcache_v1.storage.attention_store.tasks import (
    FlushDone,
    MatchTask,
    ReadStorageTask,
    WriteDone,
    WriteStorageTask,
)
from fastdeploy_kvcache_v1.storage.engine.link import StorageLink
from fastdeploy_kvcache_v1.storage.messages import Connect, Connected, LoadDone, QueryDone, UseNamespace
from tests.storage.attention_store.memory import BLOCK_SIZE, LAYOUT, Memory, space, tokens
from tests.storage.attention_store.stand_in import num_stored, set_faults

LIMIT_S = 20.0
PATH = tokens(1, 2, 3)


class Machine:
    """A link and the agents of its ranks, as threads of this process."""

    def __init__(self, sockets, ranks=1, connects=True):
        self.answers = queue.SimpleQueue()
        self.space = space(tensor_parallel_size=ranks)
        commands = [f"ipc://{sockets}/commands{rank}" for rank in range(ranks)]
        results = f"ipc://{sockets}/results"
        self.link = StorageLink(commands, results, open_backend=None, lanes_per_agent=NUM_LANES)
        self.memory = [Memory(rank) for rank in range(ranks)]
        self.agents = [AttentionStoreAgent(address, results, rank=rank) for rank, address in enumerate(commands)]
        if connects:
            for agent, memory in zip(self.agents, self.memory, strict=True):
                agent.use(memory.caches())
                agent.connect(self.space)
        while not self.link.is_connected(100):
            pass
        self.link.listen(self.answers.put)
        self.link.send(UseNamespace(self.space))

    def ask(self, task):
        """Returns the answers of all ranks, in order of ranks."""
        self.link.send(task)
        return sorted((self.answer() for _ in self.agents), key=lambda answer: answer.rank)

    def answer(self):
        return self.answers.get(timeout=LIMIT_S)

    def num_matched(self, first=0, path=PATH):
        self.link.send(MatchTask(task_id="m", token_ids=path, first_block_idx=first))
        return self.answer().num_stored

    def close(self):
        for agent in self.agents:
            agent.close()
        self.link.close()


@pytest.fixture
def machine(tmp_path, store):
    machines = []

    def start(**options):
        sockets = tmp_path / f"sockets{len(machines)}"
        sockets.mkdir()
        machines.append(Machine(sockets, **options))
        return machines[-1]

    yield start
    set_faults(store)
    for each in machines:
        each.close()


def write(first=0, blocks=(0, 1, 2), path=PATH, **options):
    end = BLOCK_SIZE * (first + len(blocks))
    return WriteStorageTask(
        task_id="w", token_ids=path[:end], gpu_block_ids=blocks, start_write_block_idx=first, **options
    )


def read(first=0, blocks=(5, 6, 7), path=PATH, **options):
    end = BLOCK_SIZE * (first + len(blocks))
    return ReadStorageTask(
        task_id="r", token_ids=path[:end], gpu_block_ids=blocks, start_read_block_idx=first, **options
    )


def fill(server):
    for memory in server.memory:
        for number in range(3):
            memory.fill(number, number + 1)


def test_what_one_server_stores_another_one_loads(machine):
    first, second = machine(), machine()
    fill(first)
    (done,) = first.ask(write())
    assert (done.store_id, done.rank, done.num_written, done.num_stored, done.error) == ("w", 0, 3, 3, None)
    assert done.num_bytes == 3 * LAYOUT.block_bytes
    assert second.num_matched() == 3
    assert second.num_matched(first=2) == 1
    (done,) = second.ask(read(first=1, blocks=(5, 6)))
    assert (done.load_id, done.num_arrived, done.num_bytes) == ("r", 2, 2 * LAYOUT.block_bytes)
    assert second.memory[0].holds(5, 2)
    assert second.memory[0].holds(6, 3)
    assert second.memory[0].refilled == [(5, 6)]


def test_what_is_stored_is_not_written_again_and_a_hole_is_not_written_over(machine):
    server = machine()
    fill(server)
    (done,) = server.ask(write(first=1, blocks=(1, 2)))
    assert (done.num_written, done.num_stored) == (0, 0), "block 0 is missing: they would not be found"
    server.ask(write(blocks=(0, 1)))
    (done,) = server.ask(write())
    assert (done.num_written, done.num_stored) == (1, 3)
    (done,) = server.ask(write(first=1, blocks=(1,)))
    assert (done.num_written, done.num_stored) == (0, 1), "more is stored than was asked for"


def test_each_rank_moves_its_shard_and_rank_0_answers_questions(machine, store):
    server = machine(ranks=2)
    fill(server)
    assert [done.num_written for done in server.ask(write())] == [3, 3]
    assert num_stored(store) == 6
    assert server.num_matched() == 3
    assert [done.num_arrived for done in server.ask(read())] == [3, 3]
    assert all(memory.holds(5 + number, number + 1) for memory in server.memory for number in range(3))


def test_a_new_namespace_has_none_of_the_old_blocks(machine):
    server = machine()
    fill(server)
    server.ask(write())
    server.link.send(UseNamespace(space(weight_epoch="1")))
    assert server.num_matched() == 0
    (done,) = server.ask(read())
    assert done.num_arrived == 0
    server.link.send(UseNamespace(space()))
    assert server.num_matched() == 3


def test_the_index_learns_what_is_there_and_what_is_not(machine, store):
    server = machine(ranks=2)
    for exists in (True, False):
        task = WriteStorageTask(
            task_id="f", token_ids=PATH, start_write_block_idx=1 - exists, flush_cache_exists=exists
        )
        server.link.send(task)
        answer = server.answer()
        assert (type(answer), answer.rank, answer.error) == (FlushDone, 0, None)
    pod = "default_pod_mixed_0"
    assert (store / "index.jsonl").read_text().splitlines() == [
        f'["{pod}", {list(PATH)}, 0, null, 1]',
        f'["{pod}", {list(PATH)}, 1, 1, null]',
    ]


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ({"error": "lease lost"}, "lease lost"),
        ({"crash": "a bug"}, "RuntimeError('a bug')"),
        ({"answer": 99}, "answered 99"),
    ],
)
def test_every_task_is_answered_whatever_the_sdk_does(machine, store, fault, told):
    server = machine()
    set_faults(store, **dict.fromkeys(("read", "write", "flush"), fault))
    (done,) = server.ask(read())
    assert isinstance(done, LoadDone)
    assert told in done.error
    (done,) = server.ask(write())
    assert isinstance(done, WriteDone)
    assert told in done.error
    set_faults(store, match=fault)
    (done,) = server.ask(write())
    assert told in done.error
    assert done.quiet_after_s == 0, "no block was touched"
    server.link.send(MatchTask(task_id="m", token_ids=PATH, first_block_idx=0))
    answer = server.answer()
    assert isinstance(answer, QueryDone)
    assert told in answer.error
    set_faults(store)
    (done,) = server.ask(write())
    assert (done.num_stored, done.error) == (3, None)


@pytest.mark.parametrize("task", [read(timeout=7.0), write(timeout=7.0)], ids=lambda task: type(task).__name__)
def test_a_call_that_failed_is_over_when_its_time_is(machine, store, task):
    server = machine()
    set_faults(store, read={"error": "reset"}, write={"error": "reset"})
    before = time.monotonic()
    (done,) = server.ask(task)
    took = time.monotonic() - before
    most = task.timeout + agent_module.QUIET_MARGIN_S
    assert most - took <= done.quiet_after_s <= most


def test_the_time_of_a_write_begins_after_its_question(machine, store):
    server = machine()
    set_faults(store, match={"delay_s": 2.0}, write={"error": "reset"})
    (done,) = server.ask(write(timeout=100.0))
    assert done.quiet_after_s > 99.5


def test_a_call_that_failed_after_its_time_is_over_soon(machine, store):
    server = machine()
    set_faults(store, read={"delay_s": 0.2, "error": "timed out"})
    (done,) = server.ask(read(timeout=0.1))
    assert done.quiet_after_s == agent_module.QUIET_MARGIN_S


def test_a_short_read_and_a_short_write_say_how_far_they_came(machine, store):
    server = machine()
    fill(server)
    set_faults(store, write={"short": 2})
    (done,) = server.ask(write())
    assert (done.num_written, done.num_stored, done.error) == (2, 2, None)
    set_faults(store, read={"short": 1})
    (done,) = server.ask(read())
    assert (done.num_arrived, done.error, done.quiet_after_s) == (1, None, 0)


def test_a_store_that_hangs_stops_neither_loads_nor_questions(machine, store):
    server = machine()
    fill(server)
    server.ask(write())
    set_faults(store, write={"hang": True})
    server.link.send(write(path=tokens(7, 8, 9)))
    (done,) = server.ask(read())
    assert done.num_arrived == 3
    assert server.num_matched() == 3
    set_faults(store)
    assert server.answer().store_id == "w"


class Copy:
    """One that was given up, and may still run."""

    def __init__(self):
        self.ended = threading.Event()
        self.asked = threading.Event()

    def wait_done(self, timeout):
        self.asked.set()
        return self.ended.wait(timeout)


def test_a_read_waits_for_copies_that_were_given_up_and_still_fill_its_slots(machine):
    server = machine()
    fill(server)
    server.ask(write())
    copy = Copy()
    server.memory[0].late.append(copy)
    server.link.send(read())
    assert copy.asked.wait(LIMIT_S)
    server.memory[0].fill(5, 9)  # the copy's last bytes
    assert server.answers.empty()
    copy.ended.set()
    assert server.answer().num_arrived == 3
    assert server.memory[0].holds(5, 1)


def test_a_store_waits_for_what_still_writes_to_its_slots(machine):
    server = machine()
    copy = Copy()
    server.memory[0].late.append(copy)
    server.link.send(write())
    assert copy.asked.wait(LIMIT_S)
    fill(server)
    assert server.answers.empty()
    copy.ended.set()
    assert server.answer().num_written == 3
    server.memory[0].late.clear()
    server.ask(read())
    assert server.memory[0].holds(5, 1)


@pytest.mark.parametrize("task", [read(timeout=0.05), write(timeout=0.05)])
def test_a_copy_that_never_ends_is_not_waited_for_for_ever(machine, task):
    server = machine()
    server.memory[0].late.append(Copy())
    (done,) = server.ask(task)
    assert f"slots of {task.task_id} are still written" in done.error
    assert done.quiet_after_s == 0


def test_an_agent_whose_store_hangs_says_that_its_slots_are_in_use(machine, store, monkeypatch):
    monkeypatch.setattr(lane_agent, "STOP_TIMEOUT_S", 0.05)
    server = machine()
    set_faults(store, read={"hang": True, "times": 1})
    server.link.send(read())
    while '"times": 0' not in (store / "faults.json").read_text():
        time.sleep(0.01)
    (agent,) = server.agents
    assert not agent.close()
    set_faults(store)
    monkeypatch.undo()
    assert agent.close()


def test_tasks_before_there_is_memory_are_errors(machine):
    server = machine(connects=False)
    (done,) = server.ask(read())
    assert "the device tier has no memory now" in done.error


def test_what_was_reserved_in_an_earlier_device_tier_is_neither_filled_nor_stored(machine, store):
    """A task may be late: what is in the new tier has nothing to do with the tokens that it names."""
    server = machine()
    fill(server)
    (agent,) = server.agents
    before = time.monotonic()
    assert server.ask(write(begun_at=before))[0].num_written == 3
    agent.let_go()
    for task in (read(begun_at=before), write(begun_at=before)):
        assert "has no memory now" in server.ask(task)[0].error
    memory = Memory()
    agent.use(memory.caches())
    for task in (read(begun_at=before), write(begun_at=before, path=tokens(4, 5, 6))):
        assert "made anew" in server.ask(task)[0].error
    assert num_stored(store) == 3
    assert not any(tensor.any() for tensor in memory.tensors)
    assert server.ask(read(begun_at=time.monotonic()))[0].num_arrived == 3
    assert memory.holds(5, 1)


@pytest.mark.parametrize("fault", [{"hang": True}, {"error": "reset", "late_s": 1.0}])
def test_memory_that_the_sdk_may_still_touch_stays_until_it_does_not(machine, store, monkeypatch, fault):
    monkeypatch.setattr(agent_module, "STOP_TIMEOUT_S", 0.05)
    monkeypatch.setattr(agent_module, "QUIET_MARGIN_S", 3600)
    is_quiet = threading.Event()
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: seconds == 0 or is_quiet.wait(LIMIT_S))
    monkeypatch.setattr(agent_module, "time", clock)
    server = machine()
    (agent,) = server.agents
    set_faults(store, read={"times": 1, **fault})
    server.link.send(read(timeout=1.0))
    while '"times": 0' not in (store / "faults.json").read_text():
        time.sleep(0.01)
    if "error" in fault:
        assert server.answer().quiet_after_s > 0
    gone = weakref.ref(server.memory[0].tensors[0])
    server.memory.clear()
    agent.let_go()
    gc.collect()
    assert gone() is not None
    set_faults(store)
    for thread in threading.enumerate():
        if thread.name == "late-bytes":  # the stand-in still writes: into memory that is there
            thread.join(LIMIT_S)
    is_quiet.set()
    deadline = time.monotonic() + LIMIT_S
    while gone() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_memory_that_is_not_touched_goes_at_once(machine):
    server = machine()
    server.ask(read())
    gone = weakref.ref(server.memory[0].tensors[0])
    server.memory.clear()
    server.agents[0].let_go()
    gc.collect()
    assert gone() is None


def test_every_rank_says_that_it_is_connected_or_why_not(machine, store):
    server = machine(ranks=2, connects=False)
    assert server.ask(Connect()) == [Connected(0), Connected(1)]
    set_faults(store, match={"error": "licence expired"})
    server.link.send(UseNamespace(space(weight_epoch="next", tensor_parallel_size=2)))
    for answer in server.ask(Connect()):
        assert "licence expired" in answer.error


def test_each_thread_enters_its_device_before_it_calls_the_sdk(tmp_path, store):
    entered = []
    agent = AttentionStoreAgent(
        f"ipc://{tmp_path}/commands0",
        f"ipc://{tmp_path}/results",
        rank=0,
        enter_thread=lambda: entered.append(threading.current_thread().name),
    )
    link = StorageLink([f"ipc://{tmp_path}/commands0"], f"ipc://{tmp_path}/results", open_backend=None)
    answers = queue.SimpleQueue()
    while not link.is_connected(100):
        pass
    link.listen(answers.put)
    agent.use(Memory().caches())
    for command in (UseNamespace(space()), Connect(), read(), write()):
        link.send(command)
    for _ in range(3):
        answers.get(timeout=LIMIT_S)
    assert sorted(entered) == ["kv-storage-load", "kv-storage-query", "kv-storage-store"]
    agent.close()
    link.close()


def test_a_store_that_is_not_ready_fails_the_start(machine, store):
    server = machine(connects=False)
    set_faults(store, match={"error": "licence expired"})
    with pytest.raises(StorageError, match="licence expired"):
        server.agents[0].connect(server.space)
