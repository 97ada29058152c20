"""Link and agents with Mooncake behind them: bytes that are not what they were, ranks, and a master that comes back."""

import time

import pytest

from fastdeploy_kvcache_v1.storage.messages import LoadBlocks, StoreBlocks
from fastdeploy_kvcache_v1.storage.mooncake.mooncake_backend import MooncakeBackend
from fastdeploy_kvcache_v1.storage.namespace import block_key
from tests.mooncake_master import needs_mooncake
from tests.storage.test_agent import HASHES, LIMIT_S, Machine, store
from tests.storage.values import VALUE_BYTES, namespace, register

pytestmark = [pytest.mark.process, needs_mooncake()]
INTO = (4, 5, 6, 7)


@pytest.fixture
def machine(settings, store, tmp_path):
    """As servers do; `store` gives memory to all of them."""
    machines = []

    def start(**options):
        sockets = tmp_path / f"sockets{len(machines)}"
        sockets.mkdir()
        machines.append(
            Machine(tmp_path, sockets, open_store=lambda space: MooncakeBackend(settings, space), **options)
        )
        return machines[-1]

    yield start
    for each in machines:
        each.close()


def test_a_block_with_wrong_bytes_is_a_miss_and_is_forgotten(machine, settings):
    one, two = machine(), machine()
    store(one)
    backend = MooncakeBackend(settings, namespace())
    (slot,) = register(backend, 1)
    key = block_key(HASHES[1], 0)
    backend.remove([key])
    slot[:] = bytes(VALUE_BYTES)
    assert backend.put([key], [slot]) == 1
    (done,) = two.ask(LoadBlocks("l", HASHES, INTO))
    assert (done.num_arrived, done.is_damaged, done.error) == (1, True, None)
    assert two.memory[0].holds(4, 0)
    assert backend.count_stored([key]) == 0
    backend.close()


def test_a_block_is_stored_once_all_ranks_have_it(machine):
    one, two = machine(ranks=2), machine(ranks=2)
    assert [done.num_written for done in store(one)] == [4, 4]
    assert two.num_stored(HASHES).num_stored == 0
    one.link.commit(HASHES[:3])
    assert one.answer().error is None
    assert two.num_stored(HASHES).num_stored == 3
    assert [done.num_arrived for done in two.ask(LoadBlocks("l", HASHES, INTO))] == [4, 4]
    assert all(memory.holds(4 + number, number) for memory in two.memory for number in range(4))


def test_every_command_is_answered_while_the_master_is_away_and_after_it_is_back(machine, master):
    server = machine()
    store(server)
    master.kill()
    (done,) = server.ask(LoadBlocks("l", HASHES, INTO))
    assert (done.num_arrived, done.error is None) == (0, False)
    assert server.num_stored(HASHES).error is not None
    (done,) = server.ask(StoreBlocks("s", HASHES, (0, 1, 2, 3)))
    assert done.error is not None
    master.start()
    stored, loaded = StoreBlocks("s", HASHES, (0, 1, 2, 3)), LoadBlocks("l", HASHES, INTO)
    heals(lambda: bool(server.ask(stored)) and server.num_stored(HASHES).num_stored == 4)  # in one go or in several
    heals(lambda: server.ask(loaded)[0].num_arrived == 4)


def heals(works):
    """Commands of each kind have a client of their own, which finds by itself that the master is back."""
    deadline = time.monotonic() + LIMIT_S
    while not works():
        assert time.monotonic() < deadline, "it does not heal"
