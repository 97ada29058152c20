"""What a decode server's requests wait for, what they end with, and when their blocks come back."""

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import grants as grants_module
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.grants import (
    NOT_THERE,
    TRY_AGAIN_S,
    Grants,
    Lost,
)
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import name_of
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, StartFetch

from .fake_requests import first_token, request


class Desk:
    """Ranks and pool of a `Grants`, at a time that tests move."""

    def __init__(self, num_ranks=1, give_back=None):
        self.sent, self.given_back, self.absent, self.now = [], [], [], 0.0
        self.grants = Grants(
            num_ranks=num_ranks,
            send=self._send,
            give_back=give_back or (lambda *given: self.given_back.append(given)),
            fetch_s=100.0,
            token_s=20.0,
            clock=lambda: self.now,
        )

    def _send(self, command):
        self.sent.append(command)
        return self.absent

    def grant(self, request_id="r", blocks=(3, 4)):
        made = request(request_id, blocks=blocks)
        self.grants.grant(made, name_of(made), made.block_tables)
        self.grants.check()
        return made

    def report(self, made, error=None, rank=0):
        slots = () if error is None else (3, 4)
        self.grants.reported(rank, FetchResult(name_of(made), 10, 1.0, slots, error))
        self.grants.check()

    def ready(self, *known):
        return [grant.request.request_id for grant in self.grants.take_ready(lambda each: each in known)]


@pytest.fixture
def desk():
    return Desk()


def test_blocks_come_back_only_when_every_rank_is_done_with_them():
    desk = Desk(num_ranks=2)
    made = desk.grant()
    assert desk.grants.recycle([3, 4, 5], "r")
    assert [type(each) for each in desk.sent] == [StartFetch, CancelFetch]
    assert desk.grants.num_parked == 3
    assert desk.grants.is_ending(name_of(made))
    desk.report(made, "it was cancelled", rank=1)
    assert desk.given_back == []
    desk.report(made, rank=0)  # this rank had everything when it was told
    assert desk.given_back == [([3, 4, 5], "r")]
    desk.grants.check_idle()


def test_what_no_rank_was_told_of_is_not_parked(desk):
    desk.grants.schedule_begins()
    desk.grant()
    assert not desk.grants.recycle([3, 4], "r")
    desk.grants.scheduled(1, has_freed=True)
    assert desk.sent == []
    desk.grants.check_idle()


def test_a_rank_that_is_not_there_fails_the_fetch(desk):
    desk.absent = [0]
    desk.grant()
    assert NOT_THERE in desk.grants.lost(())[0].reason


def test_a_fetch_and_then_a_token_may_take_so_long(desk):
    slow, late = desk.grant("slow"), desk.grant("late", (5,))
    desk.now = 90.0
    desk.report(late)
    assert desk.grants.lost(()) == []
    desk.now = 100.0
    assert desk.grants.lost(()) == [], "until its rank has said that it is over"
    assert desk.sent[-1] == CancelFetch(name_of(slow), "its blocks did not arrive in time")
    desk.report(slow, "cancelled")
    desk.now = 110.0
    reasons = [each.reason for each in desk.grants.lost(())]
    assert "its blocks did not arrive in time" in reasons[0]
    assert "the first token of late did not arrive in time" in reasons[1]
    assert not any("PD Error" in each for each in reasons), "a router would let them wait as long again"


@pytest.mark.parametrize(
    ("message", "reason"),
    [("no blocks", "no blocks"), (None, "prefill could not send the blocks of r")],
)
def test_what_prefill_says_went_wrong_is_passed_on_or_that_it_says_nothing(desk, message, reason):
    made = desk.grant()
    assert desk.grants.take_token(first_token(made, code=501, message=message))
    desk.report(made)
    assert desk.ready("r") == []
    assert desk.grants.lost(()) == [Lost("r", 501, reason)]


def test_a_token_of_another_transfer_is_none_of_this_request(desk):
    """Ids come from clients: an earlier request of this id was given up, and its token comes late."""
    earlier = request("r", blocks=(1,))
    made = desk.grant()
    assert not desk.grants.take_token(first_token(earlier, 66))
    assert not desk.grants.take_token(first_token(request("unknown")))
    assert desk.grants.take_token(first_token(made, 7))
    assert not desk.grants.take_token(first_token(made, 8)), "a second one"
    desk.report(made)
    (grant,) = desk.grants.take_ready(lambda each: True)
    assert grant.first_token.outputs.token_ids == [7]
    assert desk.grants.num_stray_tokens == 3


def test_a_router_is_told_to_try_again_what_failed_soon(desk):
    for seconds, again in ((TRY_AGAIN_S - 0.1, True), (TRY_AGAIN_S, False)):
        made = desk.grant()
        desk.now += seconds
        desk.report(made, "it broke")
        (lost,) = desk.grants.lost(())
        assert lost.reason.startswith("PD Error: ") is again
        assert not desk.grants.recycle([3, 4], "r")


def test_names_of_the_last_grants_are_known(desk, monkeypatch):
    monkeypatch.setattr(grants_module, "MOST_NAMES", 2)
    names = [name_of(desk.grant(str(number), (number,))) for number in range(3)]
    assert [desk.grants.knew(name) for name in names] == [False, True, True]
