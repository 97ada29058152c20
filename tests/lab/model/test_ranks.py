"""Rounds of a group of ranks: one answer for all of them, whatever one of them does."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from fastdeploy_kvcache_v1.errors import RankLostError, RanksDisagreeError, TransferError
from fastdeploy_kvcache_v1.lab.model.ranks import DATA, PeerError, PeerTransferError
from tests.lab.server.engine.family_engine import rank_group


def on_all(ranks, action):
    """What `action(rank)` gives, or raises, on each rank at the same time."""

    def outcome(rank):
        try:
            return action(rank)
        except Exception as error:
            return error

    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(outcome, ranks))


@pytest.fixture(params=[2, 3])
def ranks(request):
    group = rank_group(request.param)
    yield group
    for rank in group:
        rank.close()


def part_of(rank):
    """Larger than a socket's buffer: a rank that only writes would wait for one that only writes."""
    return bytes([rank.rank]) * 600_000


def test_every_rank_gets_all_parts_in_rank_order(ranks):
    expected = [part_of(rank) for rank in ranks]
    assert on_all(ranks, lambda rank: rank.exchange(part_of(rank))) == [expected] * len(ranks)


def test_every_rank_gets_what_any_rank_gives(ranks):
    assert on_all(ranks, lambda rank: rank.union({rank.rank, 7})) == [{*range(len(ranks)), 7}] * len(ranks)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("error", "kind", "told"),
    [(TransferError("no link"), PeerTransferError, "no link"), (OSError(5), PeerError, "OSError(5)")],
)
def test_a_failure_of_one_rank_is_that_of_all_and_the_group_goes_on(ranks, failing, error, kind, told):
    def act(rank):
        return rank.fail(error) if rank.rank == failing else rank.exchange(part_of(rank))

    outcomes = on_all(ranks, act)
    assert [type(each) for each in outcomes] == [kind] * len(ranks)
    assert {str(each) for each in outcomes} == {f"rank {failing}: {told}"}
    assert on_all(ranks, lambda rank: rank.union({1})) == [{1}] * len(ranks)


def test_ranks_that_come_to_other_results_are_told_so(ranks):
    assert on_all(ranks, lambda rank: rank.agree(b"same")) == [None] * len(ranks)
    outcomes = on_all(ranks, lambda rank: rank.agree(b"same" if rank.rank == 0 else b"other"))
    assert {type(each) for each in outcomes} == {RanksDisagreeError}


def test_a_rank_in_another_round_is_noticed(ranks):
    """Its numbers would be taken for those of another layer."""
    ranks[1]._peers[0].send((1, (DATA, set())))
    with pytest.raises(RanksDisagreeError, match="rank 1 is in round 1, rank 0 in 0"):
        ranks[0].union(())


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_ended_is_named_at_once_by_those_that_need_it(dead):
    ranks = rank_group(2, timeout_s=None)
    ranks[dead].close()
    (alive,) = [rank for rank in ranks if rank.rank != dead]
    with pytest.raises(RankLostError, match=f"rank {dead} of 2 has ended"):
        alive.exchange(part_of(alive))
    alive.close()


def test_a_rank_that_ends_before_the_answer_is_named():
    first, last = rank_group(2)
    last._peers[0].send((0, (DATA, set())))
    last.close()
    with pytest.raises(RankLostError, match="rank 1 of 2 has ended"):
        first.union(())
    first.close()


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_that_sends_nothing_is_lost_after_the_time_limit(silent):
    ranks = rank_group(2, timeout_s=0.2)
    (other,) = [rank for rank in ranks if rank.rank != silent]
    with pytest.raises(RankLostError, match=rf"rank {silent} of 2 sent nothing for 0\.2 s"):
        other.union(())
    for rank in ranks:
        rank.close()
