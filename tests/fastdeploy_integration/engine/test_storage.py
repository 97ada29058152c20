"""Which requests wait for their stored prefix inside FastDeploy, and until when."""

import random
import threading
import time
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import ModelError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import adapter
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.copy_reports import CopyNews
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.same_id import HeldBack
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.storage import MOST_HELD, EngineStorage
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.metadata import EVICT, PassProgress, SwapStep, TransferReport, TransferResult
from fastdeploy_kvcache_v1.scheduler.load_costs import FEWEST_TOKENS
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.messages import UseNamespace
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from fastdeploy_kvcache_v1.timings import PrefillTime, Timings
from tests.storage.values import namespace

from .fake_scheduler import FakeTask, make_adapter
from .storage_scheduler import StorageScheduler


class Calm(random.Random):
    """Every answer and report comes in the step after it was asked for."""

    def random(self):
        return 0.45

    def choice(self, items):
        return items[0]


@pytest.fixture
def cache():
    return make_adapter(24, 40, write_policy="write_through")


@pytest.fixture
def scheduler(cache):
    return StorageScheduler(cache, Calm())


@pytest.fixture
def hurried(cache):
    """Its requests wait only as long as that is sooner than computing."""
    return StorageScheduler(cache, Calm(), prefetch="timeout")


def serve(scheduler, request_id, tokens):
    task = FakeTask(request_id, tokens, 2)
    scheduler.add(task)
    scheduler.step()
    while scheduler.manager.requests:
        scheduler.step()
    return task


def store(scheduler, tokens):
    """Serve `tokens`, and let all of it reach the store."""
    serve(scheduler, "first", tokens)
    serve(scheduler, "second", [9, 9, 9])  # what the first one left goes to the host with this batch
    for _ in range(4):
        scheduler.step()
    assert scheduler.storage.tier.counters.store.blocks >= len(tokens) // 4


def empty(scheduler):
    """The tiers of the server, as a restart does."""
    scheduler.cache.batch_dropped()
    serve(scheduler, "after", [8, 8, 8])  # tells that no copy from before runs any more


TOKENS = list(range(1, 18))


def test_a_request_waits_for_its_stored_prefix_and_starts_from_it(scheduler):
    store(scheduler, TOKENS)
    empty(scheduler)
    task = FakeTask("again", TOKENS, 2)
    scheduler.add(task)
    assert not scheduler.waiting
    scheduler.add(FakeTask("other", [7] * 9, 2))
    while "again" in scheduler.manager.requests:
        scheduler.step()
    assert task.num_cached_blocks >= 4
    assert [task.request_id for task in scheduler.finished.values()][-2:] == ["other", "again"]
    assert scheduler.storage.tier.counters.load.blocks == 4


def measure_prefill(scheduler):
    """A second per token."""
    scheduler.cache.measured({0: Timings((), (PrefillTime(FEWEST_TOKENS, 0.0, float(FEWEST_TOKENS)),))})


def is_held(scheduler, request_id):
    """Whether a prompt of which four blocks are stored waits for them in an empty server. It is served then."""
    empty(scheduler)
    task = FakeTask(request_id, TOKENS, 2)
    scheduler.add(task)
    held = scheduler.storage.holds(request_id)
    while scheduler.manager.requests:
        scheduler.step()
    assert task.num_cached_blocks == 4 or not held
    return held


@pytest.mark.parametrize(("load_s", "held"), [(3.5, True), (4.5, False)])
def test_a_request_waits_only_for_what_is_sooner_loaded_than_computed(hurried, load_s, held):
    """Four blocks of four tokens; 16 s to compute."""
    store(hurried, TOKENS)
    hurried.store.seconds_per_block = load_s
    assert is_held(hurried, "measures the store")
    measure_prefill(hurried)
    assert is_held(hurried, "decides") == held
    counters = hurried.storage.tier.counters
    assert counters.declined_requests == (not held)
    assert counters.late_requests == 0


def test_hashes_made_for_the_store_are_those_of_the_match(scheduler, monkeypatch):
    made = []
    tokens_of = adapter.TaskTokens
    monkeypatch.setattr(adapter, "TaskTokens", lambda *given: made.append(given) or tokens_of(*given))
    serve(scheduler, "r", TOKENS)
    assert len(made) == 1


def test_what_is_aborted_waits_no_longer(scheduler):
    store(scheduler, TOKENS)
    empty(scheduler)
    task = FakeTask("again", TOKENS, 2)
    assert scheduler.cache.waits_for_storage(task)
    assert scheduler.storage.release(scheduler.manager) == []
    scheduler.manager.waiting_abort_req_id_set.add("again")
    assert scheduler.storage.release(scheduler.manager) == [task]
    assert scheduler.storage.has_released(task)
    assert scheduler.storage.holds("again")
    scheduler.storage.queued(task)
    assert not scheduler.storage.holds("again")


def test_all_go_on_when_they_are_told_to(scheduler):
    tasks = [FakeTask(name, TOKENS) for name in "ab"]
    assert all(scheduler.cache.waits_for_storage(task) for task in tasks)
    scheduler.storage.release_all()
    assert scheduler.storage.take_released(1) == tasks[:1]
    assert scheduler.storage.release(scheduler.manager) == tasks[1:]


def test_a_reset_ends_all_waiting(scheduler):
    scheduler.cache.waits_for_storage(FakeTask("a", TOKENS))
    scheduler.cache.reset()
    assert [task.request_id for task in scheduler.storage.release(scheduler.manager)] == ["a"]


def test_released_requests_are_taken_once_in_order_of_arrival(scheduler):
    """As a prefill server does, whose requests do not go to FastDeploy's queue."""
    tasks = [FakeTask(name, TOKENS) for name in "abc"]
    assert all(scheduler.cache.waits_for_storage(task) for task in tasks)
    assert scheduler.storage.take_released(3) == []
    scheduler.manager.waiting_abort_req_id_set.update("abc")
    scheduler.storage.release(scheduler.manager)
    assert scheduler.storage.take_released(0) == scheduler.storage.take_released(-1) == []
    assert scheduler.storage.take_released(2) == tasks[:2]
    assert [scheduler.storage.holds(name) for name in "abc"] == [False, False, True]
    assert scheduler.storage.release(scheduler.manager) == tasks[2:]
    scheduler.storage.clear()
    assert scheduler.storage.take_released(3) == []


def test_only_so_many_wait_and_the_others_are_fetched_for_all_the_same(scheduler):
    tasks = [FakeTask(f"r{number}", [number + 1] * 9) for number in range(MOST_HELD + 3)]
    held = [scheduler.cache.waits_for_storage(task) for task in tasks]
    assert held == [True] * MOST_HELD + [False] * 3
    assert scheduler.storage.tier.num_waiting_requests == MOST_HELD, "the others are in FastDeploy's queue"
    assert len(scheduler.store.queries) == len(tasks)


def test_a_request_that_was_not_held_is_fetched_for_until_it_is_scheduled_or_gone(cache):
    scheduler = StorageScheduler(cache, Calm(), prefetch="best_effort")
    task, gone = FakeTask("a", TOKENS), FakeTask("b", TOKENS[::-1])
    scheduler.manager.requests.update(a=task, b=gone)
    assert not cache.waits_for_storage(task)
    assert not cache.waits_for_storage(gone)
    fetches = scheduler.storage.tier._fetches._fetches
    scheduler.storage.release(scheduler.manager)
    assert list(fetches) == ["a", "b"]
    del scheduler.manager.requests["b"]
    scheduler.storage.release(scheduler.manager)
    assert list(fetches) == ["a"]
    scheduler.waiting.append(task)
    scheduler.step()
    assert list(fetches) == []


def test_the_first_batch_after_a_reset_tells_where_copies_are(cache):
    first, second = (SimpleNamespace(request_id=name) for name in "ab")
    cache.send_swaps([first])
    assert SWAP_ATTRIBUTE not in vars(first)
    cache.reset()
    cache.send_swaps([])
    cache.send_swaps([first])
    assert SWAP_ATTRIBUTE in vars(first)
    cache.batch_sent()
    cache.send_swaps([second])
    assert SWAP_ATTRIBUTE not in vars(second)


def test_other_weights_have_other_blocks(scheduler):
    store(scheduler, TOKENS)
    scheduler.reset()
    scheduler.storage.weights_changed()
    names = [scheduler.store.namespace]
    serve(scheduler, "again", TOKENS)
    assert scheduler.storage.tier.counters.load.blocks == 0
    scheduler.storage.weights_changed()
    names.append(scheduler.store.namespace)
    assert len({*names, namespace().digest}) == 3


class FakeLink:
    num_ranks = 1

    def __init__(self):
        self.is_ready, self.sent = False, []
        self.listen = self.close = lambda *_: None

    def send(self, command):
        self.sent.append(command)

    def query(self, query_id, hashes):
        raise AssertionError("nothing is asked without a namespace")


def unnamed(cache, link, find_namespace):
    tier = StorageTier(cache.manager, StorageSettings("file", "/unused", min_tokens=1), None, link)
    storage = cache.storage = EngineStorage(tier, link, lock=cache._lock, find_namespace=find_namespace)
    return storage


def test_until_model_and_workers_are_there_requests_are_served_without_storage(cache):
    link, found = FakeLink(), threading.Event()
    manager = SimpleNamespace(requests={}, waiting_abort_req_id_set=set())

    def find():
        found.wait(30)
        return namespace()

    storage = unnamed(cache, link, find)
    storage.start()
    assert not cache.waits_for_storage(FakeTask("a", TOKENS))
    storage.copies_reported(CopyNews((), {0: 0}))
    storage.release(manager)
    assert link.sent == []
    found.set()
    while storage._namespace is None:
        time.sleep(0.001)
    storage.release(manager)
    assert link.sent == [], "the workers are not there: what is sent now is lost"
    link.is_ready = True
    storage.release(manager)
    storage.release(manager)
    assert link.sent == [UseNamespace(namespace())]


def test_weights_that_change_before_the_namespace_is_found_count(cache):
    link = FakeLink()
    link.is_ready = True
    storage = unnamed(cache, link, namespace)
    storage.weights_changed()
    assert link.sent == []
    storage._find()
    storage.release(SimpleNamespace(requests={}, waiting_abort_req_id_set=set()))
    (command,) = link.sent
    assert command.namespace.weight_epoch != namespace().weight_epoch


@pytest.mark.parametrize("error", [ModelError("no such file"), OSError("bug")])
def test_a_model_that_cannot_be_read_leaves_the_storage_off(cache, caplog, error):
    def find():
        raise error

    storage = unnamed(cache, FakeLink(), find)
    storage._find()
    storage.release(SimpleNamespace(requests={}, waiting_abort_req_id_set=set()))
    assert [message.partition(":")[0] for message in caplog.messages] == ["the storage tier stays off"]
    assert not cache.waits_for_storage(FakeTask("a", TOKENS))


class FakeManager:
    """What the wrapped methods use of ResourceManagerV1."""

    def __init__(self, cache):
        self.cache_manager, self.lock = cache, threading.RLock()
        cache.held_back, cache.arrivals = HeldBack(cache.storage.holds), threading.Lock()
        self.waiting, self.running, self.requests = [], [], {}
        self.waiting_abort_req_id_set = set()
        self.to_be_rescheduled_request_id_set, self.to_be_aborted_req_id_set = set(), set()

    def add_request(self, request):
        def original(request):
            self.waiting.append(request)
            self.requests[request.request_id] = request

        engine_patches.add_request(original, self, (request,), {})


def test_two_requests_of_one_id_do_not_meet_while_one_waits_for_the_store(scheduler):
    cache = scheduler.cache
    manager = FakeManager(cache)
    first, second = FakeTask("same", TOKENS), FakeTask("same", TOKENS)
    manager.add_request(first)
    manager.add_request(second)
    assert (manager.waiting, len(cache.held_back)) == ([], 1)
    cache.storage.tier.cache_reset()
    for request in cache.storage.release(manager):
        manager.add_request(request)
        assert cache.held_back.release(manager) == []
        cache.storage.queued(request)
    assert manager.waiting == [first]
    assert cache.held_back.release(manager) == []
    manager.waiting.clear()
    manager.requests.clear()
    assert cache.held_back.release(manager) == [second]


def test_weights_that_change_while_nobody_can_be_told_stop_the_tier(cache):
    link = FakeLink()
    link.is_ready = True
    storage = unnamed(cache, link, namespace)
    manager = SimpleNamespace(requests={}, waiting_abort_req_id_set=set())
    storage._find()
    storage.release(manager)
    link.is_ready = False
    storage.weights_changed()
    assert not cache.waits_for_storage(FakeTask("a", TOKENS)), "a question would be about the old weights"
    link.is_ready = True
    storage.release(manager)
    assert len({command.namespace.digest for command in link.sent}) == 2


def test_a_request_that_cannot_be_looked_at_goes_straight_to_the_queue(scheduler, caplog):
    broken = FakeTask("a", TOKENS)
    broken.prompt_token_ids = None
    assert not scheduler.cache.waits_for_storage(broken)
    assert caplog.messages == ["request a does not wait for storage"]


@pytest.mark.parametrize("is_paused", [True, False])
def test_only_a_paused_engine_gets_other_weights(is_paused):
    changed = []
    cache = SimpleNamespace(storage=SimpleNamespace(weights_changed=lambda: changed.append(True)))
    engine = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=cache), is_paused=is_paused)
    assert engine_patches.control_other_weights(lambda request: request, engine, ("r",), {}) == "r"
    assert changed == [True] * is_paused


def test_two_requests_of_one_id_that_come_at_the_same_time_do_not_meet(scheduler, monkeypatch):
    """FastDeploy's fetch thread brings one, and the schedule loop, which lets held ones go, the other."""
    manager, tokens_of = FakeManager(scheduler.cache), adapter.TaskTokens
    is_hashing, may_go_on = threading.Event(), threading.Event()

    def slow_tokens(*given):
        is_hashing.set()
        assert may_go_on.wait(30)
        return tokens_of(*given)

    monkeypatch.setattr(adapter, "TaskTokens", slow_tokens)
    tasks = [FakeTask("same", TOKENS), FakeTask("same", TOKENS)]
    threads = [threading.Thread(target=manager.add_request, args=(task,)) for task in tasks]
    threads[0].start()
    assert is_hashing.wait(30)
    threads[1].start()
    threads[1].join(0.1)  # as far as it gets
    may_go_on.set()
    for thread in threads:
        thread.join()
    held = [task for task in tasks if scheduler.storage._held.get("same") is task]
    assert (held, len(scheduler.cache.held_back)) == ([tasks[0]], 1)


# ---- what the tier is told


class Tier:
    """Notes what it is told, instead of a tier."""

    needs_token_ids = holds_device_blocks = False

    def __init__(self):
        self.told = []

    def __getattr__(self, name):
        def tell(*given):
            self.told.append((name, *given))
            return False

        return tell


class Passes:
    def __init__(self, told):
        self.doubt = lambda **how: told.append(("doubt", how))
        self.reported = lambda rank, progress: told.append(("passes", rank, progress))


def told_storage(*, follows_passes):
    tier = Tier()
    passes = Passes(tier.told) if follows_passes else None
    return EngineStorage(tier, FakeLink(), lock=threading.RLock(), find_namespace=namespace, passes=passes), tier.told


@pytest.mark.parametrize("follows_passes", [True, False])
def test_what_may_be_lost_is_doubted_where_passes_are_followed(follows_passes):
    storage, told = told_storage(follows_passes=follows_passes)
    storage.batch_lost()
    storage.rows_dropped()
    storage.cache_reset()
    doubts = [("doubt", {}), ("doubt", {"rows_stay": True}), ("cache_reset",), ("doubt", {})]
    assert told == (doubts if follows_passes else [("cache_reset",)])
    assert storage.follows_passes is follows_passes


@pytest.mark.parametrize("follows_passes", [True, False])
@pytest.mark.parametrize("unlisted_through", [-1, 0, 5])
def test_failed_copies_are_told_before_what_has_ended(follows_passes, unlisted_through):
    storage, told = told_storage(follows_passes=follows_passes)
    failed, progress = (TransferResult(3, *EVICT, 1, 0, 0.0, (7,), "injected"),), PassProgress(3, 1.0)
    storage.copies_reported(CopyNews(failed, {0: 4, 1: 2}, unlisted_through, {1: progress}))
    doubted = [("copies_doubted", unlisted_through)] * (unlisted_through >= 0)
    ended = [("copies_reported", rank, TransferReport((), 0.0, step)) for rank, step in ((0, 4), (1, 2))]
    news = [("passes", 1, progress)] * follows_passes
    assert told == [*doubted, ("copies_reported", 0, TransferReport(failed)), *ended, *news]


def test_a_request_that_is_fetched_for_in_the_queue_is_left_when_it_is_scheduled_and_no_other():
    storage, told = told_storage(follows_passes=False)
    storage.tier.may_start = lambda request_id: True
    tasks, step = [FakeTask(name, TOKENS) for name in "abc"], SwapStep(4)
    assert [storage.hold(task, "tokens") for task in tasks] == [False] * 3
    for scheduled, left in (([0], "a"), ([0, 1], "b"), ([0, 1], "")):
        told.clear()
        storage.batch_scheduled([tasks[number] for number in scheduled], step)
        assert told == [("step_taken", step), *[("request_left", name) for name in left], ("go_on",)]


def test_when_fastdeploy_has_ended_every_request_the_tier_waits_for_none():
    storage, told = told_storage(follows_passes=False)
    assert storage.hold(FakeTask("held", TOKENS), "tokens")
    storage.tier.may_start = lambda request_id: True
    assert not storage.hold(FakeTask("ahead", TOKENS), "tokens")
    told.clear()
    storage.clear()
    assert told == [("request_left", "held"), ("request_left", "ahead")]


def test_other_weights_empty_the_tier_before_anything_is_named_again():
    storage, told = told_storage(follows_passes=True)
    storage.weights_changed()
    assert told == [("cache_reset",), ("forget_namespace",)]
