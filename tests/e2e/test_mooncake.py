"""Real servers with a real Mooncake between them: a hit on one machine's memory from another one."""

import pytest

from tests.e2e.server_process import started
from tests.e2e.test_storage import CACHED, PROMPT, SIZE, ask, end, wait_stored
from tests.mooncake_master import Master, needs_mooncake

pytestmark = needs_mooncake()


def flags(**changes):
    settings = {
        "--swap-space": "0.02",
        "--write-policy": "write_through",
        "--kvcache-storage-backend": "mooncake",
        "--storage-prefetch": "wait_complete",
        **changes,
    }
    return [*SIZE, *(word for pair in settings.items() for word in pair)]


@pytest.fixture
def master(tmp_path):
    master = Master(tmp_path)
    yield master
    master.kill()


@pytest.fixture
def start(tmp_path, master):
    """A server on the master, as a context."""

    def started_server(name, address=None, **changes):
        return started(tmp_path / name, *flags(**changes), environment=master.environment(address))

    return started_server


def test_two_servers_share_what_they_compute(start):
    with start("one") as one, start("two") as two:
        tokens, cached = ask(one)
        assert cached == 0
        wait_stored(one)
        assert ask(two) == (tokens, CACHED)
        other = PROMPT[::-1]
        tokens, _ = ask(two, other)
        wait_stored(two)
        assert ask(one, other) == (tokens, CACHED)
        assert one.metrics()["storage_blocks_total{direction=load}"] == CACHED / 16
        end(one)
        end(two)
