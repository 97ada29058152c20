"""Faults of copies that an environment variable asks for: which calls of which stream of which rank."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.errors import TransferError
from fastdeploy_kvcache_v1.lab.model import copy_faults
from fastdeploy_kvcache_v1.lab.model.copy_faults import CopyFaults, InjectedCopyError, make_runtime


def failed(faults: CopyFaults, stream: str, calls: int) -> list[int]:
    found = []
    for call in range(calls):
        try:
            faults(stream)
        except InjectedCopyError:
            found.append(call)
    return found


def test_the_named_calls_of_a_stream_fail_and_each_stream_counts_its_own():
    faults = CopyFaults(fail={"swap_in": [0, 2], "swap_out": "all"})
    assert failed(faults, "kv-swap_in", 4) == [0, 2]
    assert failed(faults, "kv-swap_out", 2) == [0, 1]
    assert failed(faults, "compute", 3) == []


def test_delays_are_those_of_the_stream(monkeypatch):
    slept = []
    monkeypatch.setattr(copy_faults.time, "sleep", slept.append)
    faults = CopyFaults(delay_ms={"swap_in": 20})
    faults("kv-swap_in")
    faults("kv-swap_out")
    assert slept == [0.02, 0.0]
    slept.clear()
    faults = CopyFaults(max_delay_ms=10)
    for _ in range(50):
        faults("kv-swap_in")
    assert all(0 <= seconds <= 0.01 for seconds in slept)
    assert len({*slept}) > 40


@pytest.mark.parametrize(("rank", "fails"), [(0, False), (1, True)])
def test_only_the_named_ranks_have_faults(rank, fails):
    runtime = make_runtime('{"fail": {"swap_in": "all"}, "ranks": [1]}', rank)
    stream = runtime.new_stream("kv-swap_in")
    stream.begin()
    stream.submit(lambda: None)
    event = stream.record_event()
    if fails:
        with pytest.raises(TransferError, match="injected"):
            event.wait(20)
    else:
        event.wait(20)
    stream.close()
