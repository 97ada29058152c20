"""A rank's caches go away and come back while a peer knows it: nothing of before is read, and both go on."""

import socket

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.pausing import PREFILL_PAUSED
from tests.transfer.peer import HOST

from .test_role_runners import Pair, continued, expected, model, tokens_of  # noqa: F401  fixtures


@pytest.fixture
def pair(model, tmp_path):  # noqa: F811
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    made = Pair(model, tmp_path, port=port)
    yield made
    made.close()


def transfer(pair, expected, name="a"):  # noqa: F811
    """One whole request."""
    pair.told.clear()
    pair.channel.news.clear()
    pair.fetch([3, 1, 8], name)
    pair.prefill.insert_tasks([pair.prefill_task(name)])
    first = tokens_of(pair.prefill, 1)
    assert pair.settled() == ((name, None), None)
    pair.decode.insert_tasks([])
    assert continued(pair, first[0], [3, 1, 8, 11]) == expected[1:]
    pair.decode.clear_requests()
    pair.prefill.clear_requests()


@pytest.mark.parametrize("sleeper", ["prefill", "decode"])
def test_a_transfer_ends_before_the_memory_goes_and_the_next_one_is_right(pair, expected, sleeper):  # noqa: F811
    transfer(pair, expected)
    runner, role = (pair.prefill, pair.roles[0]) if sleeper == "prefill" else (pair.decode, pair.roles[1])
    before, port = role.transfers.plane_address, pair.roles[1].transfers.port
    pair.told.clear()
    pair.channel.news.clear()
    pair.fetch([3, 1, 8], "b")
    pair.prefill.insert_tasks([pair.prefill_task("b", start=0, end=8)])
    tokens_of(pair.prefill, 1)
    pair.until(lambda: pair.roles[1].transfers._fetches.num_offers)
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


def test_a_wakeup_that_cannot_listen_can_be_tried_again(pair, expected):  # noqa: F811
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


def test_a_lease_ends_when_the_engine_says_so(pair):
    pair.fetch([3, 1, 8])
    pair.fetch([4], "b")
    pair.prefill.insert_tasks([pair.prefill_task(start=0, end=8)])
    tokens_of(pair.prefill, 1)
    pair.until(lambda: pair.roles[1].transfers._fetches.num_offers)
    pair.leases.withdraw_all(PREFILL_PAUSED)
    (name, error), fetch_error = pair.settled()
    assert (name, error) == ("a", PREFILL_PAUSED)
    assert PREFILL_PAUSED in fetch_error
    pair.roles[0].transfers.check_idle()
    assert len(pair.channel.news) == 1
