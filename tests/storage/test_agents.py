"""What the agents of the attention store promise: what moves, and what happens when the store does not work."""

import threading

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.attention_store import agent as agent_module
from fastdeploy_kvcache_v1.storage.messages import LoadDone, QueryDone
from tests.storage.machines import BLOCKS, INTO, LIMIT_S

SOON = pytest.approx(0, abs=LIMIT_S)


@pytest.fixture
def machine(start_machine):
    return start_machine


def test_what_one_server_stores_another_one_loads(machine):
    first, second = machine(), machine()
    (done,) = first.store(*BLOCKS)
    assert (done.store_id, done.num_written, done.num_refused, done.error) == ("s", 4, 0, None)
    assert done.seconds == SOON
    num_bytes = done.num_bytes // 4
    answer = second.query(*BLOCKS)
    assert answer == QueryDone("q", 4, SOON)
    (done,) = second.load(*BLOCKS)
    assert done == LoadDone("l", 4, num_bytes=4 * num_bytes, seconds=SOON)
    assert second.holds(*BLOCKS)
    assert second.memory[0].refilled == [INTO]


def test_what_is_stored_is_not_written_again(machine):
    server = machine()
    server.store(0, 1)
    assert [done.num_written for done in server.store(*BLOCKS)] == [2]
    (done,) = server.store(*BLOCKS)
    assert (done.num_written, done.num_bytes, done.error) == (0, 0, None)


def test_loads_end_at_the_first_block_that_is_missing(machine):
    server = machine()
    (done,) = server.store(0, 1)
    assert server.query(*BLOCKS).num_stored == 2
    (loaded,) = server.load(*BLOCKS)
    assert (loaded.num_arrived, loaded.is_damaged, loaded.error) == (2, False, None)
    assert loaded.num_bytes == done.num_bytes
    assert server.memory[0].refilled == [INTO[:2]]
    (loaded,) = server.load(2, 3)
    assert (loaded.num_arrived, loaded.error) == (0, None)


def test_block_is_found_when_every_rank_has_stored_its_part(machine):
    server = machine(ranks=2)
    assert [done.num_written for done in server.store(*BLOCKS)] == [4, 4]
    assert server.query(*BLOCKS).num_stored == 4
    assert [done.num_arrived for done in server.load(*BLOCKS)] == [4, 4]
    assert server.holds(*BLOCKS)


def test_a_new_namespace_has_none_of_the_old_blocks(machine):
    server = machine()
    server.store(*BLOCKS)
    server.use_namespace(weight_epoch="1")
    assert server.query(*BLOCKS).num_stored == 0
    assert [done.num_arrived for done in server.load(*BLOCKS)] == [0]
    server.use_namespace()
    assert server.query(*BLOCKS).num_stored == 4
    assert [done.num_arrived for done in server.load(*BLOCKS)] == [4]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (StorageError("the store is down"), "the store is down"),
        (ConfigError("wrong directory"), "wrong directory"),
        (RuntimeError("a bug"), "RuntimeError('a bug')"),
    ],
)
def test_every_command_is_answered_whatever_the_store_raises(machine, monkeypatch, error, told):
    monkeypatch.setattr(agent_module, "QUIET_MARGIN_S", 0.0)
    server = machine()
    server.fails(error, "load", "store", "query")
    (stored,), asked = server.store(*BLOCKS), server.query(*BLOCKS)
    server.link.send(server.loading(*BLOCKS, timeout=0.0))
    failing, loaded = server.answer(), server.answer()
    assert told in failing.error
    assert (stored.store_id, stored.num_written) == ("s", 0)
    assert (loaded.load_id, loaded.num_arrived) == ("l", 0)
    assert (asked.query_id, asked.num_stored) == ("q", 0)
    assert all(told in answer.error for answer in (stored, loaded, asked))
    server.works()
    assert [done.num_written for done in server.store(*BLOCKS)] == [4]
    assert [done.num_arrived for done in server.load(*BLOCKS)] == [4]


def test_a_store_that_hangs_stops_neither_loads_nor_questions(machine):
    server = machine()
    server.store(0, 1, 2)
    server.hangs("store")
    server.link.send(server.storing(*BLOCKS))
    server.wait_until_it_hangs()
    assert [done.num_arrived for done in server.load(0, 1, 2)] == [3]
    assert server.query(*BLOCKS).num_stored == 3
    server.works()
    assert server.answer().store_id == "s"


def test_an_agent_whose_store_hangs_says_that_its_slots_are_in_use(machine, monkeypatch):
    monkeypatch.setattr(agent_module, "STOP_TIMEOUT_S", 0.05)
    server = machine()
    server.hangs("load")
    server.link.send(server.loading(*BLOCKS))
    server.wait_until_it_hangs()
    (agent,) = server.agents
    hanging = [thread for thread in threading.enumerate() if thread.name.startswith("kv-storage")]
    assert all(thread.daemon for thread in hanging), "the process may end"
    assert not agent.close()
    assert not agent.close()
    server.works()
    monkeypatch.setattr(agent_module, "STOP_TIMEOUT_S", LIMIT_S)
    assert agent.close()


def test_an_idle_agent_ends_at_once(machine):
    (agent,) = machine().agents
    assert agent.close()
    assert agent.close()


def test_without_memory_nothing_is_moved_and_all_is_answered(machine):
    server = machine()
    (agent,) = server.agents
    agent.let_go()
    (loaded,), (stored,) = server.load(*BLOCKS), server.store(*BLOCKS)
    assert (loaded.num_arrived, stored.num_written) == (0, 0)
    for done in (loaded, stored):
        assert "has no memory" in done.error


def test_an_engine_whose_workers_are_gone_does_not_wait_for_them(machine):
    server = machine()
    (agent,) = server.agents
    assert server.link.is_ready
    assert agent.close()
    for _ in range(3000):
        server.link.send(server.loading(*BLOCKS))
