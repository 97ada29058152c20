"""AttentionStoreAgent over the stand-in SDK: device blocks, and when a call that failed is over."""

import gc
import queue
import threading
import time
import weakref
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from fastdeploy_kvcache_v1.errors import StorageError
from fastdeploy_kvcache_v1.storage.attention_store import agent as agent_module
from fastdeploy_kvcache_v1.storage.attention_store.sdk import SdkConnection
from fastdeploy_kvcache_v1.storage.attention_store.tasks import FlushDone, WriteStorageTask
from fastdeploy_kvcache_v1.storage.messages import Connect, Connected, Failing
from tests.storage.attention_store.memory import LAYOUT, Memory, tokens
from tests.storage.attention_store.stand_in import num_stored
from tests.storage.machines import BLOCKS, LIMIT_S


@pytest.fixture
def machine(start_machine):
    return start_machine


def test_a_hole_is_not_written_over_and_no_more_is_told_than_was_asked_for(machine):
    server = machine()
    (done,) = server.store(1, 2)
    assert (done.num_written, done.num_stored) == (0, 0), "block 0 is missing: they would not be found"
    (done,) = server.store(0, 1)
    assert (done.num_written, done.num_stored, done.num_bytes) == (2, 2, 2 * LAYOUT.block_bytes)
    (done,) = server.store(0, 1, 2)
    assert (done.num_written, done.num_stored, done.num_bytes) == (1, 3, LAYOUT.block_bytes)
    (done,) = server.store(1)
    assert (done.num_written, done.num_stored) == (0, 1), "more is stored"


def test_questions_and_loads_begin_anywhere_in_a_path(machine):
    server = machine()
    server.store(*BLOCKS)
    assert [server.query(*BLOCKS[first:]).num_stored for first in BLOCKS] == [4, 3, 2, 1]
    server.load(1, 2)
    assert server.holds(1, 2)
    assert not server.holds(3)
    server.use_namespace(weight_epoch="1")
    assert server.query(2, 3).num_stored == 0


def test_the_index_learns_from_rank_0_what_is_there_even_while_writes_hang(machine):
    server = machine(ranks=2)
    server.breaks(write={"hang": True})
    server.link.send(server.storing(*BLOCKS))
    path = server.path(*BLOCKS)
    for exists in (True, False):
        flush = {"start_write_block_idx": 1 - exists, "flush_cache_exists": exists}
        server.link.send(WriteStorageTask(task_id="f", token_ids=path, **flush))
        assert server.answer() == FlushDone("f", 0, 0, seconds=pytest.approx(0, abs=LIMIT_S))
    pod = "default_pod_mixed_0"
    assert (server.directory / "index.jsonl").read_text().splitlines() == [
        f'["{pod}", {list(path)}, 0, null, 1]',
        f'["{pod}", {list(path)}, 1, 1, null]',
    ]


@pytest.mark.parametrize(
    # The task; seconds that its question and its move take; seconds until it is quiet, of which one is a margin.
    ("what", "asks_s", "moves_s", "waits_s"),
    [("load", 0, 2, 6), ("load", 0, 9, 1), ("store", 50, 2, 6), ("store", 0, 9, 1)],
)
def test_a_call_that_failed_is_answered_when_its_time_is_over(machine, monkeypatch, what, asks_s, moves_s, waits_s):
    server, now, timers, timer = machine(), [1000.0], queue.SimpleQueue(), Mock()
    monkeypatch.setattr(agent_module.threading, "Timer", lambda *call: timers.put(call) or timer)
    monkeypatch.setattr(agent_module, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def takes(call, seconds):
        real = getattr(SdkConnection, call)

        def slow(*given):
            now[0] += seconds
            return real(*given)

        monkeypatch.setattr(SdkConnection, call, slow)

    takes("match", asks_s)
    takes("read", moves_s)
    takes("write", moves_s)
    server.fails("reset", what)
    task = {"load": server.loading, "store": server.storing}[what](*BLOCKS, timeout=7.0)
    server.link.send(task)
    seconds, answer = timers.get(timeout=LIMIT_S)
    assert seconds == waits_s
    if what == "load":
        assert server.answer() == Failing("l", "the attention store could not read: reset")
    assert server.answers.empty()
    answer()
    assert "reset" in server.answer().error
    assert timer.daemon is True, "a process that ends does not wait for it"


def test_a_short_read_and_a_short_write_say_how_far_they_came(machine):
    server = machine()
    server.breaks(write={"short": 2})
    (done,) = server.store(*BLOCKS)
    assert (done.num_written, done.num_stored, done.error) == (2, 2, None)
    server.breaks(read={"short": 1})
    (done,) = server.load(*BLOCKS)
    assert (done.num_arrived, done.error) == (1, None)
    assert server.memory[0].refilled == [(7,)]


class Copy:
    """One that was given up, and may still run."""

    def __init__(self):
        self.ended = threading.Event()
        self.asked = threading.Event()

    def wait_done(self, timeout):
        self.asked.set()
        return self.ended.wait(timeout)


@pytest.mark.parametrize("what", ["load", "store"])
def test_a_move_waits_for_what_still_writes_to_its_slots(machine, what):
    """Copies that were given up, and the fill of new tensors."""
    server, copy = machine(), Copy()
    server.store(*BLOCKS) if what == "load" else None
    server.memory[0].late.append(copy)
    server.link.send({"load": server.loading, "store": server.storing}[what](*BLOCKS))
    assert copy.asked.wait(LIMIT_S)
    server.memory[0].fill(7, 9)  # the copy's last bytes
    server.memory[0].fill(0, 5 if what == "store" else 0)
    assert server.answers.empty()
    copy.ended.set()
    assert server.answer().error is None
    server.memory[0].late.clear()
    server.load(*BLOCKS)
    assert server.memory[0].holds(7, 5 if what == "store" else 0)


@pytest.mark.parametrize("what", ["load", "store"])
def test_a_copy_that_never_ends_is_not_waited_for_for_ever(machine, what):
    server = machine()
    server.memory[0].late.append(Copy())
    task = {"load": server.loading, "store": server.storing}[what](*BLOCKS, timeout=0.05)
    (done,) = server.ask(task)
    assert f"slots of {task.task_id} are still written" in done.error


def test_blocks_reserved_in_an_earlier_device_tier_are_not_moved(machine):
    """A task may be late: what is in the new tier has nothing to do with the tokens that it names."""
    server, before = machine(), time.monotonic()
    (agent,) = server.agents
    assert server.ask(server.storing(*BLOCKS, begun_at=before))[0].num_written == 4
    agent.let_go()
    late = server.loading(*BLOCKS, begun_at=before), server.storing(*BLOCKS, path=tokens(6, 7, 8, 9), begun_at=before)
    for task in late:
        assert "has no memory now" in server.ask(task)[0].error
    memory = Memory()
    agent.use(memory.caches())
    for task in late:
        assert "made anew" in server.ask(task)[0].error
    assert num_stored(server.directory) == 4
    assert not any(tensor.any() for tensor in memory.tensors)
    assert server.ask(server.loading(*BLOCKS, begun_at=time.monotonic()))[0].num_arrived == 4
    assert memory.holds(6, 1)


@pytest.mark.parametrize("fault", [{"hang": True}, {"error": "reset", "late_s": 0.3}])
def test_memory_that_the_sdk_may_still_touch_stays_until_it_does_not(machine, monkeypatch, fault):
    monkeypatch.setattr(agent_module, "STOP_TIMEOUT_S", 0.05)
    server, timers = machine(), queue.SimpleQueue()
    monkeypatch.setattr(agent_module.threading, "Timer", lambda *call: timers.put(call) or Mock())
    (agent,) = server.agents
    server.breaks(read={"times": 1, **fault})
    server.link.send(server.loading(*BLOCKS, timeout=1.0))
    server.wait_until_it_hangs()
    if "error" in fault:
        assert server.answer() == Failing("l", "the attention store could not read: reset")
    gone = weakref.ref(server.memory[0].tensors[0])
    server.memory.clear()
    agent.let_go()
    gc.collect()
    assert gone() is not None
    assert not agent.close()
    server.works()
    if "error" in fault:
        for thread in threading.enumerate():
            if thread.name == "late-bytes":  # the stand-in still writes: into memory that is there
                thread.join(LIMIT_S)
        assert gone() is not None
        _, answer = timers.get(timeout=LIMIT_S)
        answer()
        assert server.answer().error is not None
        del answer
    deadline = time.monotonic() + LIMIT_S
    while gone() is not None or not agent.close():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_memory_that_is_not_touched_goes_at_once(machine):
    server = machine()
    server.load(*BLOCKS)
    gone = weakref.ref(server.memory[0].tensors[0])
    server.memory.clear()
    server.agents[0].let_go()
    gc.collect()
    assert gone() is None


def test_every_rank_says_that_it_is_connected_or_why_not(machine):
    server = machine(ranks=2, connects=False)
    assert server.ask(Connect()) == [Connected(0), Connected(1)]
    server.fails("licence expired", "query")
    server.use_namespace(weight_epoch="next")
    for answer in server.ask(Connect()):
        assert "licence expired" in answer.error


def test_a_store_that_is_not_ready_fails_the_start(machine):
    server = machine(connects=False)
    server.fails("licence expired", "query")
    with pytest.raises(StorageError, match="licence expired"):
        server.agents[0].connect(server.namespace())


def test_each_thread_enters_its_device_before_it_calls_the_sdk(machine):
    entered = []
    server = machine(enter_thread=lambda: entered.append(threading.current_thread().name))
    for command in (Connect(), server.loading(0), server.storing(0)):
        assert server.ask(command)[0].error is None
    assert sorted(entered) == ["kv-storage-load", "kv-storage-query", "kv-storage-store"]
