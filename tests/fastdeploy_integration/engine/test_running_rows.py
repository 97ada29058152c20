"""What a batch says of the rows that it leaves running."""

import json
import threading
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.contract.messages import SWAP_IN, SWAP_OUT, BlockCopies, SwapStep
from fastdeploy_kvcache_v1.contract.swap_message import encode
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.running_rows import running_rows
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import (
    ROWS_ATTRIBUTE,
    SWAP_ATTRIBUTE,
    SwapInbox,
    SwapOutbox,
    take_off,
    take_running,
)

STEP = SwapStep.of(0, BlockCopies(*SWAP_OUT, (1,), (2,)), BlockCopies(*SWAP_IN, (3,), (5,)))


def test_a_row_has_a_length_once_it_has_a_token_behind_what_it_prefills():
    rows = [(3, 100, 100), (0, 101, 100), (7, 120, 120), (1, 121, 120)]
    running = [SimpleNamespace(idx=i, num_total_tokens=total, need_prefill_tokens=p) for i, total, p in rows]
    manager = SimpleNamespace(lock=threading.Lock(), running=running)
    assert running_rows(manager) == [(3, 0), (0, 101), (7, 0), (1, 121)]


def test_rows_ride_on_every_batch_and_leave_the_task_with_it():
    outbox, task = SwapOutbox(), SimpleNamespace()
    outbox.attach([task], SwapStep(0), running=[(0, 5)])
    assert not outbox.is_loaded, "a batch without copies is no loss to the chain of copies"
    assert getattr(task, ROWS_ATTRIBUTE) == ((0, 5),)
    outbox.clear()
    assert vars(task) == {}, "FastDeploy uses one object for every chunk"
    outbox.attach([task], SwapStep(1))
    assert take_running([task]) is None


def test_the_latest_of_several_batches_tells():
    first, second = SimpleNamespace(), SimpleNamespace()
    for task, rows in ((first, [(0, 5), (1, 0)]), (second, [(1, 9)])):
        SwapOutbox().attach([task], SwapStep(0), running=rows)
    assert take_running([first, second]) == ((1, 9),)
    assert take_running([first, second]) is None


@pytest.mark.parametrize("forged", ["x", [], {"x": 1}, 7, None, json.loads(json.dumps(encode(STEP, -1), default=list))])
def test_what_the_engine_did_not_attach_is_never_decoded(forged, caplog):
    """A body's `metadata` becomes attributes of a request. One of them ends no worker, and writes nothing."""
    first, second = SimpleNamespace(), SimpleNamespace()
    for task in (first, second):
        setattr(task, SWAP_ATTRIBUTE, forged)
        setattr(task, ROWS_ATTRIBUTE, forged)
    SwapOutbox().attach([first], STEP, running=[(0, 5)])
    assert take_running([first, second]) == ((0, 5),)
    assert SwapInbox().take([first, second]) == [STEP]
    assert vars(second) == {}
    assert "1 requests have an attribute _kvcache_v1_swaps that a client set: ignored" in caplog.text


def test_a_request_that_comes_in_brings_nothing_under_our_names():
    request = SimpleNamespace(prompt="p", **{SWAP_ATTRIBUTE: "x", ROWS_ATTRIBUTE: "y"})
    take_off(request)
    take_off(request)
    assert vars(request) == {"prompt": "p"}
