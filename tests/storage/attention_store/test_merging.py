"""One answer of all ranks."""

import pytest

from fastdeploy_kvcache_v1.storage.attention_store.merging import Merging
from fastdeploy_kvcache_v1.storage.attention_store.tasks import WriteDone
from fastdeploy_kvcache_v1.storage.messages import LoadDone, RankDone


def test_a_load_has_arrived_as_far_as_on_every_rank():
    merging = Merging(2, lambda: 0.0)
    other = LoadDone("other", 1)
    assert merging.add(RankDone(0, LoadDone("l", 3, num_bytes=30, seconds=1.0))) is None
    assert merging.add(RankDone(1, other)) is None
    merged = merging.add(RankDone(1, LoadDone("l", 2, is_damaged=True, num_bytes=20, seconds=3.0)))
    assert merged == LoadDone("l", 2, is_damaged=True, num_bytes=50, seconds=3.0)
    assert merging.add(RankDone(0, other)) == other


@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_one_rank_fails_has_failed(failing):
    merging = Merging(2, lambda: 0.0)
    for rank in (0, 1):
        error = "no route" if rank == failing else None
        merged = merging.add(RankDone(rank, WriteDone("w", 2 * rank + 1, error=error, num_stored=3 - rank)))
    assert merged == WriteDone("w", 3, error=f"rank {failing}: no route", num_stored=2)


def test_slots_are_quiet_when_the_last_rank_is():
    now = 0.0
    merging = Merging(2, lambda: now)
    merging.add(RankDone(0, LoadDone("l", 0, error="reset", quiet_after_s=30.0)))
    now = 10.0
    merged = merging.add(RankDone(1, LoadDone("l", 3)))
    assert merged.quiet_after_s == 20.0
    merging.add(RankDone(0, LoadDone("m", 0, error="reset", quiet_after_s=5.0)))
    now = 20.0
    assert merging.add(RankDone(1, LoadDone("m", 3))).quiet_after_s == 0.0
