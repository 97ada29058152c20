"""The store that reads and fills device blocks inside FastDeploy: what it is told, and what it leaves to requests."""

import threading
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import ModelError, StorageError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import seats
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import storage as storage_module
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.same_id import HeldBack
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.storage import EngineStorage
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.storage.attention_store.tier import AttentionStoreTier
from fastdeploy_kvcache_v1.storage.messages import Connect, Connected, UseNamespace
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from fastdeploy_kvcache_v1.swap_message import START
from tests.storage.values import namespace

from .attention_scheduler import AttentionScheduler
from .by_hand import begin
from .fake_scheduler import FakeTask, Status, make_adapter
from .test_storage import Calm, serve

TOKENS = list(range(1, 18))


@pytest.fixture
def scheduler():
    return AttentionScheduler(make_adapter(32), Calm())


def steps(scheduler, number=6):
    for _ in range(number):
        scheduler.step()


def stored(scheduler):
    """Token ids of blocks that are stored, by their last block."""
    return {path[1] for path in scheduler.store.values}


def test_a_prefix_is_stored_at_the_end_of_a_request_and_loaded_after_a_reset(scheduler):
    serve(scheduler, "first", TOKENS)
    steps(scheduler)
    assert tuple(TOKENS[:16]) in stored(scheduler), "although no batch followed"
    scheduler.reset()
    task = FakeTask("again", TOKENS, 2)
    scheduler.add(task)
    assert not scheduler.waiting
    while scheduler.manager.requests:
        scheduler.step()
    assert task.prefill_start_index == 16
    assert scheduler.storage.tier.counters.load.blocks == 4
    scheduler.settle()
    scheduler.cache.manager.check_idle()


def test_the_first_request_of_a_server_without_traffic_is_loaded_for(scheduler):
    """No batch was ever sent: an idle rank says all there is to know."""
    other = AttentionScheduler(make_adapter(32), Calm())
    serve(other, "elsewhere", TOKENS)
    steps(other)
    scheduler.store.values.update(other.store.values)
    assert serve(scheduler, "first", TOKENS).prefill_start_index == 16


@pytest.mark.parametrize(("status", "number"), [("FINISHED", 1), ("PREEMPTED", 1), ("RUNNING", 1), ("WAITING", 0)])
def test_whatever_ends_a_request_that_has_computed_is_told_with_its_tokens(status, number):
    """An abortion leaves the status as it is. A match that is taken back is no end."""
    cache, ended = make_adapter(32), []
    cache.storage = SimpleNamespace(
        request_ended=lambda tokens: ended.append((tokens.token_ids(), tokens.num_plain_blocks)),
        batch_scheduled=lambda *_: None,
        follows_passes=True,
    )
    task = FakeTask("a", TOKENS)
    if not number:
        cache.request_match_blocks(task, 4)
    else:
        begin(cache, task)
        cache.send_swaps([task])
        cache.batch_sent()
    task.status = Status[status]
    cache.release_block_ids(task)
    cache.release_block_ids(task)
    assert ended == [(TOKENS, 4)] * number


def test_every_batch_carries_a_step_and_one_that_is_lost_costs_no_block(scheduler):
    cache, carried = scheduler.cache, []
    receive = scheduler.worker.receive
    scheduler.worker.receive = lambda batch: carried.append(getattr(batch[0], SWAP_ATTRIBUTE)) or receive(batch)
    serve(scheduler, "first", TOKENS)
    assert [message[1] for message in carried] == list(range(len(carried)))
    cached = cache.manager.stats().device_cached_blocks
    assert cached >= 4
    asked = iter([False, True])  # when it has been scheduled, and on its way
    scheduler.loses = lambda: next(asked, False)
    serve(scheduler, "second", [7] * 9)
    assert scheduler.num_lost == 1
    assert cache.manager.stats().device_cached_blocks > cached
    assert [message[2] for message in carried].count(START) == 2, "the chain begins again behind the lost one"


def test_what_the_next_request_of_fastdeploys_queue_needs_is_not_lent(scheduler):
    serve(scheduler, "first", TOKENS)
    steps(scheduler)
    scheduler.reset()
    scheduler.waiting.append(FakeTask("large", [5] * 31 * 4))  # all but one block of the tier
    task = FakeTask("again", TOKENS, 2)
    scheduler.manager.requests["again"] = task
    assert scheduler.cache.waits_for_storage(task)
    for _ in range(5):
        scheduler._answer_some()
        scheduler._report()
        scheduler.storage.release(scheduler.manager)
    assert scheduler.cache.manager.stats().device_loading_blocks == 0
    scheduler.waiting.clear()
    scheduler.storage.release(scheduler.manager)
    assert scheduler.cache.manager.stats().device_loading_blocks == 4


def test_nor_what_a_preempted_one_needs_that_is_on_its_way_back(scheduler):
    manager = scheduler.manager
    assert storage_module._num_wanted_tokens(manager) == 0
    manager.requests["p"] = FakeTask("p", [1] * 40)
    manager.to_be_rescheduled_request_id_set.update(["p", "gone"])
    manager.waiting.append(FakeTask("w", [1] * 30))
    assert storage_module._num_wanted_tokens(manager) == 40


@pytest.mark.parametrize(
    ("status", "is_held", "asked"), [("PREEMPTED", True, 0), ("PREEMPTED", False, 1), ("WAITING", True, 1)]
)
def test_a_preempted_request_waits_until_the_store_gave_its_blocks_back(scheduler, status, is_held, asked):
    serve(scheduler, "first", TOKENS)
    if is_held:
        scheduler.storage.release(scheduler.manager)  # the store is given what is to be stored
    assert scheduler.storage.tier.holds_device_blocks == is_held
    request, calls = FakeTask("p", TOKENS), []
    request.status = Status[status]
    resources = SimpleNamespace(cache_manager=scheduler.cache, stop_flags=[True])
    for match in (seats.get_prefix_cached_blocks, engine_patches.get_prefix_cached_blocks_in_turn):
        assert match(lambda each: not calls.append(each), resources, (request,), {}) is bool(asked)
    assert len(calls) == 2 * asked


def test_slots_that_wait_for_a_batch_keep_none_back():
    """The batch that takes the open copies away is that of the request which would wait for the slots."""
    scheduler = AttentionScheduler(make_adapter(32, 16, write_policy="write_through"), Calm())
    serve(scheduler, "first", TOKENS)
    steps(scheduler)
    scheduler.reset()
    serve(scheduler, "other", [7] * 17)  # its last blocks are copied with the next batch
    task = FakeTask("again", TOKENS, 2)
    scheduler.manager.requests["again"] = task
    assert scheduler.cache.waits_for_storage(task)

    def loading():
        for _ in range(20):
            scheduler.now += 0.5
            scheduler._end_some()
            scheduler._answer_some()
            scheduler._report()
            scheduler.storage.release(scheduler.manager)
        return scheduler.cache.manager.stats().device_loading_blocks

    assert loading() == 4
    assert not scheduler.storage.tier.holds_device_blocks
    scheduler.waiting.append(FakeTask("large", [5] * 31 * 4))
    assert loading() == 0


def test_rows_that_compute_on_after_clear_data_are_waited_for(scheduler):
    """FastDeploy forgets its requests and tells no worker."""
    serve(scheduler, "first", TOKENS)
    steps(scheduler)
    scheduler.cache.held_back = HeldBack()
    engine = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=scheduler.cache))
    engine_patches.clear_data(lambda: None, engine, (), {})
    passes, step, now = scheduler.storage._passes, scheduler.worker.last_step, scheduler.now
    scheduler.worker.tracker.submitted()
    scheduler._report()
    assert not passes.have_ended(step, now)
    steps(scheduler, 2)  # the rank says that it is idle
    assert passes.have_ended(step, now)


# ---- the start


class Link:
    """Answers a `Connect` as the test says."""

    num_ranks = 2

    def __init__(self, *answers, is_ready=True):
        self.sent, self.is_ready, self._answers, self._listener = [], is_ready, answers, None

    def listen(self, listener):
        self._listener = listener

    def send(self, command):
        self.sent.append(type(command))
        for answer in self._answers if isinstance(command, Connect) else ():
            self._listener(answer)


def opened(link, find_namespace=namespace):
    cache = make_adapter(32)
    tier = AttentionStoreTier(cache.manager, StorageSettings("attention_store"), None, link)
    return EngineStorage(tier, link, lock=threading.RLock(), find_namespace=find_namespace)


def test_the_start_names_the_namespace_and_waits_for_every_rank():
    link = Link(Connected(1), Connected(0))
    opened(link).start_connected()
    assert link.sent == [UseNamespace, Connect]


def nameless():
    raise ModelError("no weights")


@pytest.mark.parametrize(
    ("link", "find", "error", "reason"),
    [
        (Link(Connected(0), Connected(1, error="licence expired")), namespace, StorageError, r"expired \(rank 1\)"),
        (Link(Connected(0)), namespace, StorageError, "not ready on all ranks within 0 s"),
        (Link(is_ready=False), namespace, StorageError, "see the logs of the workers"),
        (Link(), nameless, ModelError, "no weights"),
    ],
    ids=["a rank cannot use it", "a rank does not answer", "no workers", "no name"],
)
def test_what_fails_the_start(monkeypatch, link, find, error, reason):
    for name in ("CONNECT_TIMEOUT_S", "WORKERS_TIMEOUT_S"):
        monkeypatch.setattr(storage_module, name, 0.01)
    with pytest.raises(error, match=reason):
        opened(link, find).start_connected()
