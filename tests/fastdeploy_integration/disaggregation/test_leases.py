"""A prefill engine's account of transfers, of which each rank tells in its own order, and what FastDeploy hears."""

import pytest

from fastdeploy_kvcache_v1.errors import InvariantError
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.leases import LeaseOpened, Leases, LeaseWithdrawn
from fastdeploy_kvcache_v1.transfer.ledger import TransferTotals
from fastdeploy_kvcache_v1.transfer.offer_desk import LeaseEnd
from fastdeploy_kvcache_v1.transfer.rank_messages import WithdrawLease


class Account:
    def __init__(self, num_ranks=2):
        self.sent = []
        self.leases = Leases(num_ranks=num_ranks, send=self.sent.append)
        self.num_ranks = num_ranks

    def open(self, name, *ranks):
        for rank in ranks or range(self.num_ranks):
            self.leases.heard(rank, LeaseOpened(name, f"request of {name}"))

    def end(self, rank, name, error=None):
        self.leases.heard(rank, LeaseEnd(name, name, error))
        self.leases.check()

    def ended(self):
        return [(request_id.removeprefix("request of "), status) for request_id, status in self.leases.take_ended()]


@pytest.fixture
def account():
    return Account()


def test_transfers_that_end_in_another_order_on_each_rank_are_not_mixed_up(account):
    account.open("a")
    account.open("b")
    account.end(0, "a")
    account.end(1, "b", "the peer died")
    assert account.ended() == [], "the other rank of either has yet to end"
    with pytest.raises(InvariantError):
        account.leases.check_idle()
    account.end(0, "b", "the peer died")
    assert account.ended() == [("b", "error: the peer died")]
    account.end(1, "a")
    assert account.ended() == [("a", "finished")]
    assert account.leases.ledger.totals == TransferTotals(started=2, arrived=1, failed=1)
    account.leases.check_idle()


def test_all_that_are_open_are_withdrawn_once_and_end_when_each_rank_has_said_so(account):
    account.open("a")
    account.open("b", 0)
    account.leases.withdraw_all("paused")
    account.leases.withdraw_all("paused")
    assert account.sent == [WithdrawLease("a", "paused"), WithdrawLease("b", "paused")]
    account.open("b", 1)
    assert account.sent[2:] == [WithdrawLease("b", "paused")], "it had no lease when the others were told"
    for name in "ab":
        account.end(0, name, "paused")
        assert account.ended() == []
        account.end(1, name, "paused")
        assert account.ended() == [(name, "error: paused")]
    assert account.leases.ledger.totals == TransferTotals(started=2, cancelled=2)
    account.leases.check_idle()


def test_the_first_reason_is_told_and_the_withdrawal_is_sent_once():
    account = Account(3)
    account.open("a")
    account.end(2, "a", "the link broke")
    for rank in (0, 1):
        account.end(rank, "a", "so it was withdrawn")
    assert account.sent == [WithdrawLease("a", "the link broke")]
    assert account.ended() == [("a", "error: the link broke")]
    assert account.leases.ledger.totals.failed == 1


def test_what_the_ranks_give_up_themselves_counts_as_cancelled(account):
    account.open("a")
    for rank in (0, 1):
        account.leases.heard(rank, LeaseWithdrawn("a"))
        account.end(rank, "a", "given up")
    assert account.sent == []
    assert account.ended() == [("a", "error: given up")]
    assert account.leases.ledger.totals == TransferTotals(started=1, cancelled=1)
