"""A decode server's requests wait for blocks and a first token; what cannot run is answered, and leaves nothing."""

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import grants as grants_module
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.first_tokens import REFUSAL_S
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.grants import (
    ABORTED,
    FAILED,
    NOT_THERE,
    TRY_AGAIN_S,
    Lost,
)
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import name_of
from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, StartFetch
from tests.fastdeploy_integration.engine.by_hand import Status

from .decode_server import DecodeServer
from .fake_requests import END, first_token, request

DROP = "decode_drop", ["r"]


def test_a_first_token_waits_for_its_blocks_and_others_pass_it():
    server = DecodeServer(known=["slow", "fast"])
    slow, fast = server.granted("slow"), server.granted("fast")
    others = [("decode", [request("new")]), DROP]
    server.report(fast)
    assert server.loop(first_token(slow), first_token(fast), items=others) == [["new"], DROP, ["fast"]]
    assert server.loop() == []
    assert [server.tokens.is_empty(lambda is_empty=is_empty: is_empty) for is_empty in (True, False)] == [True, False]
    server.report(slow)
    assert server.loop() == [["slow"]]
    assert server.answers == []


def test_a_request_whose_client_has_not_come_yet_waits_for_it_and_not_for_ever():
    server = DecodeServer()
    for name in ("r", "other"):
        made = server.granted(name)
        server.report(made)
        assert server.loop(first_token(made)) == []
        if name == "r":
            server.front_end.requests[name] = None
            assert server.loop() == [["r"]]
    server.now = 20.0
    assert server.loop() == []
    assert server.answers == [("other", FAILED, True)]


@pytest.mark.parametrize("cause", ["fetch failed", "prefill failed", "abort"])
def test_a_request_that_cannot_run_is_answered_and_leaves_nothing(cause):
    server = DecodeServer(known=["r"])
    made = server.granted()
    if cause == "fetch failed":
        server.report(made, "the peer died")
    elif cause == "prefill failed":
        server.loop(first_token(made, code=501, message="no"))
    else:
        server.manager.waiting_abort_req_id_set |= {"r", "of a request that is not here"}
    server.loop()
    assert server.manager.waiting_abort_req_id_set == set()
    server.loop()
    code = {"fetch failed": FAILED, "prefill failed": 501, "abort": ABORTED}[cause]
    assert (server.answers, server.num_ended) == ([("r", code, True)], 1)
    assert server.engine.token_processor.tokens_counter == {}
    assert server.manager.requests == {}
    if cause != "fetch failed":  # its rank has not said yet that it is over
        assert server.grants.num_parked == 3
        server.report(made, "cancelled")
        server.loop()
    server.cache.check_idle()
    assert server.loop(first_token(made)) == []
    assert len(server.answers) == 1


def test_a_request_that_is_complete_with_its_first_token_does_not_run():
    server = DecodeServer(known=["r"])
    made = server.granted()
    server.report(made)
    assert server.loop(first_token(made, END)) == []
    assert server.answers == [("r", 200, True)]
    server.cache.check_idle()


# ---- without blocks here


def test_a_refusal_reaches_the_client_of_a_request_that_never_got_blocks():
    server = DecodeServer(known=["r", "running"])
    server.manager.requests["running"] = request("running")
    asked = [request(name) for name in ("unknown", "r", "running")]
    assert server.loop(*(first_token(each, code=502, message="full") for each in asked)) == []
    assert server.answers == [("r", 502, True)]


@pytest.mark.parametrize("told", ["refusal", "drop"])
@pytest.mark.parametrize(("after_s", "is_answered"), [(REFUSAL_S - 1, True), (REFUSAL_S, False)])
def test_a_refusal_waits_for_the_request_which_the_router_sends_to_both(told, after_s, is_answered):
    server = DecodeServer()
    if told == "refusal":
        server.loop(first_token(request("r"), code=499, message="paused"))
    else:
        server.loop(items=[DROP])
    assert server.answers == []
    server.now = after_s
    if not is_answered:
        server.loop()
    for _ in range(2):  # the second is another one
        server.front_end.requests["r"] = None
        server.loop()
        assert server.answers == [("r", ABORTED, True)] * is_answered
    assert server.num_ended == 0, "FastDeploy has counted no blocks of it"


def test_a_late_error_of_a_request_does_not_end_the_next_one_of_its_id(monkeypatch):
    """The router of 2.6 sends a request that failed again, with its id. Names of the last grants are known."""
    monkeypatch.setattr(grants_module, "MOST_NAMES", 2)
    server = DecodeServer(known=["r"])
    made = server.granted()
    server.report(made, "the link broke")
    server.loop()
    server.front_end.requests["r"] = None
    server.granted("second")
    for _ in range(2):
        server.loop(first_token(made, code=501, message="prefill failed"))
        server.loop()
    assert server.answers == [("r", FAILED, True)]
    server.granted("third")
    assert [server.grants.knew(name) for name in (name_of(made), name_of(server.granted("fourth")))] == [False, True]


# ---- what a grant waits for, and what it ends with


def test_blocks_come_back_only_when_every_rank_is_done_with_them():
    server = DecodeServer(num_ranks=2)
    made = server.granted()
    server.free(made, Status.WAITING)
    assert [type(each) for each in server.sent] == [StartFetch, CancelFetch]
    assert (server.grants.num_parked, server.grants.is_ending(name_of(made))) == (3, True)
    server.arrive(made, "it was cancelled", rank=1)
    assert len(server.cache.gpu_free_block_list) == 17
    server.arrive(made, rank=0)  # this rank had everything when it was told
    server.cache.check_idle()


def test_a_rank_that_is_not_there_fails_the_fetch():
    server = DecodeServer()
    server.absent = [0]
    server.granted()
    assert NOT_THERE in server.lost()[0].reason


def test_a_fetch_and_then_a_token_may_take_so_long():
    server = DecodeServer()
    slow, late = server.granted("slow"), server.granted("late")
    server.now = 90.0
    server.arrive(late)
    assert server.lost() == []
    server.now = 100.0
    assert server.lost() == [], "until its rank has said that it is over"
    assert server.sent[-1] == CancelFetch(name_of(slow), "its blocks did not arrive in time")
    server.arrive(slow, "cancelled")
    server.now = 110.0
    slow, late = (each.reason for each in server.lost())
    assert "its blocks did not arrive in time" in slow
    assert "the first token of late did not arrive in time" in late
    assert "PD Error" not in slow + late, "a router would let them wait as long again"


@pytest.mark.parametrize(
    ("message", "reason"), [("no blocks", "no blocks"), (None, "prefill could not send the blocks of r")]
)
def test_what_prefill_says_went_wrong_is_passed_on_or_that_it_says_nothing(message, reason):
    server = DecodeServer()
    made = server.granted()
    assert server.cache.take_token(first_token(made, code=501, message=message))
    server.arrive(made)
    assert server.cache.take_ready(lambda _: True) == []
    assert server.lost() == [Lost("r", 501, reason)]


def test_a_token_of_another_transfer_is_none_of_this_request():
    """Ids come from clients: an earlier request of this id was given up, and its token comes late."""
    server = DecodeServer()
    made = server.granted()
    tokens = first_token(request("r"), 66), first_token(request("unknown")), first_token(made, 7), first_token(made, 8)
    assert [server.cache.take_token(each) for each in tokens] == [False, False, True, False]
    server.arrive(made)
    (grant,) = server.cache.take_ready(lambda _: True)
    assert grant.first_token.outputs.token_ids == [7]
    assert server.grants.num_stray_tokens == 3


@pytest.mark.parametrize(("seconds", "again"), [(TRY_AGAIN_S - 0.1, True), (TRY_AGAIN_S, False)])
def test_a_router_is_told_to_try_again_what_failed_soon(seconds, again):
    server = DecodeServer()
    made = server.granted()
    server.now += seconds
    server.arrive(made, "it broke")
    assert server.lost()[0].reason.startswith("PD Error: ") is again
    server.free(made, Status.WAITING)
    assert server.grants.num_parked == 0


def test_news_of_a_fetch_that_no_rank_owes_does_not_hide_the_next(caplog):
    server = DecodeServer()
    made = server.granted()
    server.report(request("unknown"))
    server.arrive(made)
    assert server.take_ready(made)
    assert len(caplog.messages) == 1
