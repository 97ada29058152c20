"""One answer of all ranks."""

import pytest

from fastdeploy_kvcache_v1.storage.attention_store.merging import Merging
from fastdeploy_kvcache_v1.storage.attention_store.tasks import WriteDone
from fastdeploy_kvcache_v1.storage.messages import LoadDone, RankDone


def test_a_load_has_arrived_as_far_as_on_every_rank():
    merging = Merging(2)
    other = LoadDone("other", 1)
    assert merging.add(RankDone(0, LoadDone("l", 3, num_bytes=30, seconds=1.0))) is None
    assert merging.add(RankDone(1, other)) is None
    merged = merging.add(RankDone(1, LoadDone("l", 2, is_damaged=True, num_bytes=20, seconds=3.0)))
    assert merged == LoadDone("l", 2, is_damaged=True, num_bytes=50, seconds=3.0)
    assert merging.add(RankDone(0, other)) == other


@pytest.mark.parametrize("failing", [0, 1])
def test_a_write_that_one_rank_fails_has_failed(failing):
    merging = Merging(2)
    for rank in (0, 1):
        error = "no route" if rank == failing else None
        merged = merging.add(RankDone(rank, WriteDone("w", 2 * rank + 1, error=error, num_stored=3 - rank)))
    assert merged == WriteDone("w", 3, error=f"rank {failing}: no route", num_stored=2)
