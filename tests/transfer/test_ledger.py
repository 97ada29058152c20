"""The engine's account: slots come back once, when every rank has said that its part is over."""

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, InvariantError
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.ledger import FetchEnd, FetchLedger, FetchOutcome, FetchState, LeaseLedger
from fastdeploy_kvcache_v1.transfer.offer_desk import LeaseEnd


def arrived(name="r", num_bytes=10, seconds=1.0):
    return FetchResult(name, num_bytes, seconds)


def failed(name="r", error="the link broke"):
    return FetchResult(name, 0, 1.0, (1, 2), error)


def fetching(num_ranks=1, name="r", wait_s=60.0, **arguments):
    ledger = FetchLedger(num_ranks=num_ranks, **arguments)
    assert ledger.grant(name, wait_s)
    ledger.start(name)
    return ledger


def test_a_fetch_is_over_when_its_last_rank_has_it():
    ledger = fetching(num_ranks=2)
    assert ledger.report(arrived(seconds=3.0), rank=1) is None
    ledger.check()
    assert ledger.report(arrived(), rank=0) == FetchEnd("r", FetchOutcome.ARRIVED)
    ledger.check_idle()
    assert (ledger.totals.started, ledger.totals.arrived) == (1, 1)
    assert (ledger.totals.num_bytes, ledger.totals.seconds) == (20, 3.0)


def test_a_rank_that_fails_ends_the_others_first():
    ledger = fetching(num_ranks=2)
    assert ledger.report(failed(), rank=0) is None
    assert ledger.state("r") is FetchState.ENDING
    assert ledger.take_cancels() == {"r": "the link broke"}
    assert ledger.take_cancels() == {}
    assert ledger.report(arrived(), rank=1) == FetchEnd("r", FetchOutcome.FAILED, "the link broke")
    assert ledger.totals.num_bytes == 0


def test_a_cancelled_fetch_is_over_only_when_its_rank_says_so():
    ledger = fetching()
    assert ledger.cancel("r", "the client left") is None
    assert ledger.take_cancels() == {"r": "the client left"}
    assert "r" in ledger
    assert ledger.cancel("r", "again") is None
    assert ledger.take_cancels() == {}
    # Also one whose bytes had arrived when the cancel reached the rank.
    assert ledger.report(arrived()) == FetchEnd("r", FetchOutcome.CANCELLED, "the client left")
    assert ledger.totals.cancelled == 1


def test_a_cancel_that_crosses_the_result_is_not_told():
    ledger = fetching()
    assert len(ledger) == ledger.num_open == 1
    ledger.cancel("r", "the client left")
    assert ledger.report(arrived()) == FetchEnd("r", FetchOutcome.CANCELLED, "the client left")
    assert ledger.take_cancels() == {}
    assert len(ledger) == ledger.num_open == 0


def test_a_request_that_is_granted_twice_gets_slots_once():
    ledger = FetchLedger()
    assert ledger.grant("r", 60.0)
    assert not ledger.grant("r", 60.0)
    ledger.start("r")
    assert not ledger.grant("r", 60.0)
    with pytest.raises(CacheStateError, match="started already"):
        ledger.start("r")


def test_deadlines_give_up_what_is_late_and_nothing_else():
    now = [0.0]
    ledger = FetchLedger(clock=lambda: now[0])
    for name, wait_s in (("granted", 5.0), ("fetching", 5.0), ("later", 9.0)):
        ledger.grant(name, wait_s)
    ledger.start("fetching")
    ledger.start("later")
    assert ledger.seconds_to_deadline() == 5.0
    now[0] = 5.0
    late = "its blocks did not arrive in time"
    assert ledger.give_up_overdue() == [FetchEnd("granted", FetchOutcome.OVERDUE, late)]
    assert ledger.take_cancels() == {"fetching": late}
    assert ledger.give_up_overdue() == []
    assert ledger.seconds_to_deadline() == 4.0
    assert ledger.report(failed("fetching")) == FetchEnd("fetching", FetchOutcome.OVERDUE, late)
    assert ledger.totals.overdue == 2


def test_a_report_that_is_not_owed_is_a_bug():
    ledger = fetching()
    with pytest.raises(CacheStateError, match="was not told of"):
        ledger.report(arrived("other"))
    ledger.report(arrived())
    with pytest.raises(CacheStateError, match="was not told of"):
        ledger.report(arrived())
    with pytest.raises(InvariantError, match="never ended"):
        fetching().check_idle()


@pytest.mark.parametrize(
    ("ledger", "spoil"),
    [
        (fetching(), lambda ledger: ledger._fetches["r"].ranks_left.clear()),
        (fetching(), lambda ledger: setattr(ledger._fetches["r"], "state", FetchState.GRANTED)),
        (FetchLedger(), lambda ledger: ledger._to_cancel.update(r="it is over")),
    ],
)
def test_check_sees_a_ledger_that_lost_count(ledger, spoil):
    ledger.check()
    spoil(ledger)
    for check in (ledger.check, ledger.check_idle):
        with pytest.raises(InvariantError, match=r"ranks left|to be cancelled"):
            check()


def test_a_lease_is_over_when_no_rank_holds_it():
    ledger = LeaseLedger(num_ranks=2)
    ledger.open("l")
    with pytest.raises(CacheStateError, match="open already"):
        ledger.open("l")
    assert len(ledger) == ledger.num_open == 1
    assert ("l" in ledger, "m" in ledger) == (True, False)
    assert not ledger.report(LeaseEnd("l", "r", None), rank=0)
    with pytest.raises(CacheStateError, match="was not told of"):
        ledger.report(LeaseEnd("l", "r", None), rank=0)
    assert ledger.report(LeaseEnd("l", "r", None), rank=1)
    ledger.check_idle()
    assert ledger.totals.arrived == 1


@pytest.mark.parametrize(
    ("withdrawn", "error", "counted"),
    [(False, "the peer died", "failed"), (True, "withdrawn", "cancelled"), (True, None, "arrived")],
)
def test_leases_are_counted_by_how_they_ended(withdrawn, error, counted):
    ledger = LeaseLedger()
    ledger.open("l")
    if withdrawn:
        assert ledger.withdraw("l")
        assert not ledger.withdraw("l")
    assert ledger.report(LeaseEnd("l", "r", error))
    assert not ledger.withdraw("l")
    assert getattr(ledger.totals, counted) == ledger.totals.started == 1
