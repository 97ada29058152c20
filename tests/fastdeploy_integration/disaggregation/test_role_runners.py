"""A prefill and a decode rank give the tokens of one server, whatever ends a transfer."""

import socket

import pytest

from fastdeploy_kvcache_v1.errors import LayerSwapTimeoutError
from fastdeploy_kvcache_v1.transfer.ledger import TransferTotals
from fastdeploy_kvcache_v1.worker.runtime import cpu
from tests.lab.fastdeploy_cpu.host_tasks import ABORT, PREEMPTED, other, prefill
from tests.lab.fastdeploy_cpu.runners import BLOCK, LONG, PROMPT, run, tokens, with_swaps
from tests.transfer.planes import HOST


@pytest.mark.parametrize("chunks", [[21], [8, 21], [5, 13, 21]])
def test_tokens_are_those_of_one_server(pair, expected, chunks):
    pair.fetch()
    first = []
    for start, end in zip([0, *chunks], chunks, strict=False):
        blocks = (5, 9, 2, 7, 4)[: 5 if start else 4]  # what comes behind the prompt's is not offered
        pair.prefill.insert_tasks([pair.prefill_task(blocks=blocks, start=start, end=end)])
        first = run(pair.prefill, 1)
        pair.turn()
    assert first == expected[:1]
    assert not pair.prefill._table.has_work, "the sequence goes on elsewhere"
    assert pair.settled() == (("a", None), None)
    pair.check_idle()
    assert pair.leases.take_ended() == [["a", "finished"]]
    assert pair.leases.ledger.totals == TransferTotals(started=1, arrived=1)
    assert pair.continued(*first) == expected[1:]


def test_a_fetch_waits_for_the_batch_that_ends_what_writes_its_blocks(pair, expected):
    """The row of a preempted request still computes when its blocks are given to another."""
    pair.decode.insert_tasks([prefill(0, "old", list(range(60, 80)), [3, 1, 8])])
    run(pair.decode, 1)
    pair.fetch(after_step=0)
    pair.prefill.insert_tasks([pair.prefill_task()])
    first = run(pair.prefill, 1)
    pair.offered()
    run(pair.decode, 2)  # "old" goes on
    assert pair.channel.news == []
    pair.decode.insert_tasks([with_swaps(other(PREEMPTED, 0, "old"), 0)])
    pair.turn()
    assert pair.channel.news == [], "its copies have not been submitted"
    run(pair.decode, 1)
    assert pair.settled() == (("a", None), None)
    assert pair.continued(*first) == expected[1:]


@pytest.mark.parametrize(
    ("again", "reason"),
    [
        ({"blocks": (5, 9, 3, 7)}, "it was given other blocks"),
        ({"name": "b", "row": 1, "blocks": (1, 9, 3, 4)}, "its blocks were given to another request"),
        ({"transfer": "another"}, "another request has its id|given to another request"),
    ],
)
def test_a_lease_ends_before_its_blocks_hold_anything_else(pair, again, reason):
    """FastDeploy computes a request again after a lost batch, and ids come again."""
    pair.fetch()
    pair.prefill.insert_tasks([pair.prefill_task(start=0, end=8)])
    run(pair.prefill, 1)
    pair.prefill.insert_tasks([pair.prefill_task(**{"start": 0, "end": 8, **again})])
    (name, error), fetch_error = pair.settled()
    assert name == "a"
    assert pair.leases.ledger.totals.cancelled == 1
    assert pair.leases.take_ended()[0] == ["a", f"error: {error}"]
    assert any(each in error for each in reason.split("|"))
    assert "withdrew" in fetch_error


def test_a_lease_goes_on_where_another_request_shares_its_prefix(pair):
    pair.fetch()
    pair.prefill.insert_tasks([pair.prefill_task()])
    run(pair.prefill, 1)
    pair.prefill.insert_tasks([pair.prefill_task("b", row=1, blocks=(5, 9, 4), start=16)])
    assert pair.settled() == (("a", None), None)


def test_a_rank_tells_where_it_listens_and_what_its_blocks_are(pair):
    for role, channel in zip(pair.roles, (pair.offers, pair.channel), strict=True):
        transfers, geometry = role.transfers, channel.info.geometry
        assert (channel.info.port, channel.info.plane_address) == (transfers.port, transfers.plane_address)
        assert (geometry.model, geometry.block_size, geometry.tp_size, geometry.tp_rank) == ("the model", BLOCK, 1, 0)


def test_a_request_without_a_decode_server_is_computed_and_not_offered(pair, expected):
    task = pair.prefill_task()
    task.disaggregate_info = None
    pair.prefill.insert_tasks([task])
    assert run(pair.prefill, 1) == expected[:1]
    pair.turn()
    assert pair.told == []


# ---- a rank's caches go away and come back while a peer knows it: nothing of before is read, and both go on


def transfer(pair, expected, name="a"):
    """One whole request."""
    pair.forget()
    pair.fetch(name=name)
    pair.prefill.insert_tasks([pair.prefill_task(name)])
    first = run(pair.prefill, 1)
    assert pair.settled() == ((name, None), None)
    pair.decode.insert_tasks([])
    assert pair.continued(*first) == expected[1:]
    for runner in (pair.decode, pair.prefill):
        runner.clear_requests()


@pytest.mark.parametrize("sleeper", ["prefill", "decode"])
def test_a_transfer_ends_before_the_memory_goes_and_the_next_one_is_right(make_pair, expected, sleeper):
    with socket.create_server((HOST, 0)) as listener:
        port = listener.getsockname()[1]
    pair = make_pair(port=port)
    transfer(pair, expected)
    runner, peer = (pair.prefill, pair.decode) if sleeper == "prefill" else (pair.decode, pair.prefill)
    role = pair.roles[sleeper == "decode"]
    before = role.transfers.plane_address
    pair.forget()
    pair.fetch(name="b")
    pair.prefill.insert_tasks([pair.prefill_task("b", start=0, end=8)])
    run(pair.prefill, 1)
    pair.offered()
    runner.drop_caches()
    assert not role.is_in_use
    (_, error), fetch_error = pair.settled()
    assert None not in (error, fetch_error)
    peer.clear_requests()
    runner.restore(weights=True, caches=True)
    assert role.transfers.plane_address != before
    assert pair.roles[1].transfers.port == port, "where prefill servers look for it"
    pair.turn()
    pair.check_idle()
    transfer(pair, expected, "c")
    pair.check_idle()


def test_a_request_that_comes_to_a_sleeping_prefill_rank_fails(pair):
    """FastDeploy can be told to go on without having been woken up."""
    pair.prefill.drop_caches()
    without = pair.prefill_task("without")
    without.ic_req_data = None
    pair.prefill.insert_tasks([pair.prefill_task("a"), without])
    assert pair.told == [("a", "the prefill server sleeps")]


def test_a_retry_leaves_blocks_alone_that_a_lease_holds(make_pair, monkeypatch):
    """It would wait for the lease, which ends on the thread that waits, until it gives up."""
    given_up = []
    monkeypatch.setattr(cpu, "LayerSwapTimeoutError", lambda why: given_up.append(why) or LayerSwapTimeoutError(why))
    pair = make_pair(copy_faults='{"fail": {"swap_in": "all"}}')
    runner = pair.prefill
    for task in (
        prefill(0, "z", LONG, [0, 1, 2, 4]),
        with_swaps(other(ABORT, 0, "z"), 0, swap_out=((2,), (3,))),
        pair.prefill_task("c", PROMPT, (0, 1, 6), start=16),
    ):
        runner.insert_tasks([task])
        runner.execute(1)
    shares = pair.prefill_task("a", LONG, (0, 1, 9, 10), row=1, start=24)
    runner.insert_tasks([with_swaps(shares, 1, swap_in=((3,), (9,)), previous=0)])
    runner.execute(2)
    pair.fetch(name="c")
    while not given_up and not any(tokens(rows[1:]) for rows, _ in runner.messages):
        pair.turn()
        runner.execute(2)
        assert len(runner.messages) < 1000, pair.told
    assert given_up == []
