"""Copies ride on batches: what happens when one of them never reaches the worker."""

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import TransferError
from fastdeploy_kvcache_v1.fastdeploy_host import engine_patches
from fastdeploy_kvcache_v1.fastdeploy_host.transport import SWAP_ATTRIBUTE

from .fake_scheduler import FakeScheduler, FakeTask, Status, make_adapter, serve


def lose_next_batch(scheduler):
    received = scheduler.worker.receive
    scheduler.worker.receive = lambda batch: ([], [])
    scheduler.step()
    scheduler.worker.receive = received


def test_the_attribute_is_taken_off_a_task_that_is_sent_again():
    cache = make_adapter(8, 40, write_policy="write_through")
    scheduler = FakeScheduler(cache, budget=8)
    task = FakeTask("a", [1] * 24)
    scheduler.add(task)
    scheduler.step()
    assert SWAP_ATTRIBUTE not in vars(task)
    scheduler.step()
    assert SWAP_ATTRIBUTE in vars(task)  # the blocks of the first chunk go to the host with the second
    cache.send_swaps([])
    assert SWAP_ATTRIBUTE not in vars(task)


def test_a_lost_batch_is_noticed():
    cache = make_adapter(8, 40, write_policy="write_through")
    scheduler = FakeScheduler(cache, budget=4)
    scheduler.add(FakeTask("a", [1] * 24))
    scheduler.step()
    scheduler.step()
    task = scheduler.running[0]
    vars(task).pop(SWAP_ATTRIBUTE)
    cache.update_cache_blocks(task, 4, 4)
    lose_next_batch(scheduler)
    with pytest.raises(TransferError, match="a batch was lost"):
        scheduler.step()
    cache.reset()


def test_a_batch_that_the_host_drops_itself():
    cache = make_adapter(8, 40, write_policy="write_through")
    scheduler = FakeScheduler(cache, budget=4)
    scheduler.add(FakeTask("a", [1] * 24))
    for _ in range(3):
        scheduler.step()
    lose_next_batch(scheduler)
    scheduler.worker.rows.clear()
    engine = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=cache))
    assert engine_patches.clear_data(lambda: True, engine, (), {}) is True
    cache.check()
    scheduler.running[0].status = Status.FINISHED
    scheduler._end(scheduler.running[0])
    assert serve(scheduler, [1] * 24, [1] * 24) == [0, 20]
    cache.manager.check_idle()


def test_after_a_reset_lost_batches_do_not_matter():
    cache = make_adapter(8, 40, write_policy="write_through")
    scheduler = FakeScheduler(cache, budget=4)
    scheduler.add(FakeTask("a", [1] * 24))
    for _ in range(3):
        scheduler.step()
    lose_next_batch(scheduler)
    scheduler.worker.rows.clear()
    scheduler.reset()
    scheduler.run_dry()
    cache.check()


def test_requests_that_run_keep_their_blocks_when_the_cache_is_forgotten():
    """After a weight update the host asks for an empty cache, though requests may be running again."""
    cache = make_adapter(24, 24, write_policy="write_through")
    scheduler = FakeScheduler(cache)
    serve(scheduler, [1] * 20)
    scheduler.add(FakeTask("running", [1] * 30, 12))
    scheduler.step()
    cache.batch_dropped()
    scheduler.add(FakeTask("new", [2] * 40, 12))
    scheduler.run_dry()
    cache.check()
    cache.manager.check_idle()
    assert scheduler.finished.keys() >= {"running", "new"}
