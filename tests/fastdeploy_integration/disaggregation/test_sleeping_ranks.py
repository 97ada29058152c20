"""A rank's caches go away and come back while a peer knows it: nothing of before is read, and both go on."""

import socket

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from tests.fastdeploy_integration.cpu_worker.runners import run
from tests.transfer.planes import HOST


@pytest.fixture
def pair(make_pair):
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    return make_pair(port=port)


def transfer(pair, expected, name="a"):
    """One whole request."""
    pair.told.clear()
    pair.channel.news.clear()
    pair.fetch(name=name)
    pair.prefill.insert_tasks([pair.prefill_task(name)])
    first = run(pair.prefill, 1)
    assert pair.settled() == ((name, None), None)
    pair.decode.insert_tasks([])
    assert pair.continued(*first) == expected[1:]
    pair.decode.clear_requests()
    pair.prefill.clear_requests()


@pytest.mark.parametrize("sleeper", ["prefill", "decode"])
def test_a_transfer_ends_before_the_memory_goes_and_the_next_one_is_right(pair, expected, sleeper):
    transfer(pair, expected)
    runner, role = (pair.prefill, pair.roles[0]) if sleeper == "prefill" else (pair.decode, pair.roles[1])
    before, port = role.transfers.plane_address, pair.roles[1].transfers.port
    pair.told.clear()
    pair.channel.news.clear()
    pair.fetch(name="b")
    pair.prefill.insert_tasks([pair.prefill_task("b", start=0, end=8)])
    run(pair.prefill, 1)
    pair.offered()
    runner.drop_caches()
    assert not role.is_in_use
    (_, error), fetch_error = pair.settled()
    assert error is not None
    assert fetch_error is not None
    (pair.decode if sleeper == "prefill" else pair.prefill).clear_requests()
    runner.restore(weights=True, caches=True)
    assert role.transfers.plane_address != before
    assert pair.roles[1].transfers.port == port, "where prefill servers look for it"
    pair.turn()
    pair.check_idle()
    transfer(pair, expected, "c")
    pair.check_idle()


def test_a_wakeup_that_cannot_listen_can_be_tried_again(pair, expected):
    port = pair.roles[1].transfers.port
    pair.decode.drop_caches()
    with socket.create_server((HOST, port)):
        with pytest.raises(ConfigError, match="cannot listen"):
            pair.decode.restore(weights=True, caches=True)
        assert pair.decode.is_sleeping
    pair.decode.restore(weights=True, caches=True)
    transfer(pair, expected)


def test_a_request_that_comes_to_a_sleeping_prefill_rank_fails(pair):
    """FastDeploy can be told to go on without having been woken up."""
    pair.prefill.drop_caches()
    without = pair.prefill_task("without")
    without.ic_req_data = None
    pair.prefill.insert_tasks([pair.prefill_task("a"), without])
    assert pair.told == [("a", "the prefill server sleeps")]
