"""Which requests wait for their stored prefix inside FastDeploy, and until when; what the tier is told."""

import threading
from functools import partial
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.contract.messages import SWAP_OUT, CopyResult, PassProgress, SwapStep, WorkerReport
from fastdeploy_kvcache_v1.errors import ModelError, StorageError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import adapter, seats
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches as engine_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import storage as storage_module
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.storage import MOST_HELD, EngineStorage
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.storage.messages import Connect, Connected
from tests.storage.values import namespace

from .by_hand import FakeTask, Server, Status, begin, make_adapter

TOKENS = list(range(1, 18))
"""Four blocks and a token."""

# ---- with a store that answers


def answer(server):
    while any(server.store.calls.values()):
        server.clock.advance(0.1)
        server.store.answer(SimpleNamespace(random=lambda: 0.0))


def answered(server, steps=8):
    """The store answers everything, each in 0.1 s, and copies and passes end."""
    for _ in range(steps):
        answer(server)
        server.step()
        server.cache.storage.release(server.manager)


def stored(server):
    """All blocks of TOKENS have reached the store, and left the server."""
    server.add("first", TOKENS)
    answered(server)
    server.add("second", [9, 9, 9])  # what the first one left goes to the host with this batch
    answered(server)
    assert server.cache.storage.tier.counters.store.blocks >= 4
    server.cache.batch_dropped()
    server.add("third", [8, 8, 8])  # tells that no copy from before runs any more
    answered(server)
    return server


@pytest.mark.parametrize("backend", ["file", "attention_store"])
def test_a_request_waits_for_its_stored_prefix_while_others_are_served_and_starts_from_it(backend):
    server = stored(Server(32, 40, backend=backend, write_policy="write_through"))
    task, counters = server.add("again", TOKENS, 2), server.cache.storage.tier.counters
    other = server.add("other", [7] * 2, 1)
    server.step()
    assert (list(server.manager.requests), other.prefill_end_index) == ([], 2)
    answered(server)
    assert (task.prefill_start_index, counters.load.blocks, task.storage_cache_token_num) == (16, 4, 16)
    assert (server.clients.num_ended, counters.late_requests) == ({"finished": 5}, 0)
    later = server.add("later", TOKENS)
    answered(server)
    assert (later.prefill_start_index, later.storage_cache_token_num) == (16, 0), "it was a hit in the tiers above"
    server.cache.manager.check_idle()


def test_a_request_that_cannot_be_looked_at_goes_straight_to_the_queue(caplog):
    broken = FakeTask("a", TOKENS)
    broken.prompt_token_ids = None
    assert not Server(32, 40, backend="file").cache.waits_for_storage(broken)
    assert "request a starts without its stored prefix" in caplog.messages


def test_two_requests_of_one_id_that_come_at_the_same_time_do_not_meet(monkeypatch):
    """FastDeploy's fetch thread brings one, and the schedule loop, which lets held ones go, the other."""
    server, tokens_of = Server(32, 40, backend="file"), adapter.TaskTokens
    is_hashing, may_go_on = threading.Event(), threading.Event()

    def slow_tokens(*given):
        is_hashing.set()
        assert may_go_on.wait(30)
        return tokens_of(*given)

    monkeypatch.setattr(adapter, "TaskTokens", slow_tokens)
    tasks = [FakeTask("same", TOKENS), FakeTask("same", TOKENS)]
    threads = [threading.Thread(target=server.manager.add_request, args=(task,)) for task in tasks]
    threads[0].start()
    assert is_hashing.wait(30)
    threads[1].start()
    threads[1].join(0.1)  # as far as it gets
    may_go_on.set()
    for thread in threads:
        thread.join()
    assert server.cache.storage._held["same"] is tasks[0]
    assert len(server.cache.held_back) == 1


def preempt(server, name):
    """FastDeploy has preempted a request, and the workers say that they have stopped it."""
    task, manager = FakeTask(name, TOKENS), server.manager
    task.status = Status.PREEMPTED
    manager.requests[name] = task
    manager.to_be_rescheduled_request_id_set.add(name)
    manager.reschedule_preempt_task(name)
    return task


@pytest.mark.parametrize("release", [25, 26])
def test_preempted_request_waits_for_its_stored_blocks_before_it_stops_the_queue(release):
    server = stored(Server(32, 40, backend="file", write_policy="write_through", release=release))
    manager, storage = server.manager, server.cache.storage
    task = preempt(server, "p")
    manager.reschedule_preempt_task("p")  # the workers say it again
    assert (storage.holds("p"), list(manager.waiting), storage.tier.counters.queries) == (True, [], 2)
    for _ in range(2):
        answer(server)
        server.cache.release_stored(storage, manager)
    assert (storage.holds("p"), list(manager.waiting)) == (False, [task])
    assert (manager.to_be_rescheduled_request_id_set, storage.tier.counters.load.blocks) == (set(), 4)


def test_preempted_request_does_not_wait_while_fastdeploy_waits_for_all_of_them(monkeypatch):
    """To pause, for example; it may not schedule meanwhile."""
    server = stored(Server(32, 40, backend="file", write_policy="write_through"))
    manager, storage = server.manager, server.cache.storage
    tasks = [preempt(server, "held")]
    assert storage.holds("held")
    assert engine_patches.preempted_all(lambda: "tasks", manager, (), {}) == "tasks"
    assert list(manager.waiting) == tasks
    tasks.insert(0, preempt(server, "later"))
    assert (list(manager.waiting), manager.to_be_rescheduled_request_id_set) == (tasks, set())
    monkeypatch.setattr(storage_module, "DRAIN_S", 0.0)
    engine_patches.preempted_all(list, manager, (), {})
    preempt(server, "after")
    assert storage.holds("after")


@pytest.mark.parametrize("why", ["no storage", "another server takes it", "unknown", "a new request", "no longer"])
def test_other_preempted_requests_go_back_to_the_queue_at_once(why):
    server = Server(32, 40, backend="" if why == "no storage" else "file")
    server.cache.preempted_wait = why != "another server takes it"
    task, told = FakeTask("p", TOKENS), []
    task.status = Status.WAITING if why == "a new request" else Status.PREEMPTED
    if why != "unknown":
        server.manager.requests["p"] = task
    if why != "no longer":
        server.manager.to_be_rescheduled_request_id_set.add("p")
    engine_patches.reschedule_preempt_task(lambda *given: told.append(given), server.manager, ("p", "function"), {})
    assert told == [("p", "function")]


# ---- over a tier that notes what it is told


class Link:
    """Answers a `Connect` as the test says."""

    num_ranks = 2

    def __init__(self, *answers, is_ready=True):
        self.sent, self.is_ready, self._answers, self.tell = [], is_ready, answers, print

    def listen(self, listener):
        self.tell = listener

    def send(self, command):
        self.sent.append(type(command))
        for answer in self._answers:
            self.tell(answer)


class Tier:
    needs_token_ids = holds_device_blocks = False

    def __init__(self):
        self.told, self.startable = [], set()
        self.may_start = self.startable.__contains__

    def __getattr__(self, name):
        return lambda *given: self.told.append((name, *given))


def storage_of(link=None, *, follows_passes=False, find_namespace=namespace):
    """Returns (storage, tier, what it is told)."""
    tier = Tier()
    passes = SimpleNamespace(
        doubt=lambda **how: tier.told.append(("doubt", how)),
        reported=lambda rank, progress: tier.told.append(("passes", rank, progress)),
    )
    storage = EngineStorage(
        tier, link or Link(), lock=threading.RLock(), find_namespace=find_namespace,
        passes=passes if follows_passes else None,
    )  # fmt: skip
    return storage, tier, tier.told


def manager_of(*tasks, aborted=(), waiting=(), rescheduled=()):
    return SimpleNamespace(
        requests={task.request_id: task for task in tasks},
        waiting_abort_req_id_set=set(aborted),
        to_be_rescheduled_request_id_set=set(rescheduled),
        waiting=waiting,
        lock=threading.Lock(),
    )


def names(tasks):
    return [task.request_id for task in tasks]


def test_what_is_aborted_or_may_start_is_let_go_in_order_of_arrival_and_is_here_until_it_is_queued():
    storage, tier, told = storage_of()
    tasks = [FakeTask(name, TOKENS) for name in "abcd"]
    assert all(storage.hold(task, name) for task, name in zip(tasks, "ABCD", strict=True))
    assert told == [("request_arrived", name, name.upper(), ()) for name in "abcd"]
    assert storage.release(manager_of()) == []
    told.clear()
    tier.startable.update("ac")
    assert names(storage.release(manager_of(aborted="db"))) == list("abcd")
    assert told == [("tokens_wanted", 0), ("look_again",), *(("request_passes", name) for name in "abcd"), ("go_on",)]
    assert all(storage.has_released(task) and storage.holds(task.request_id) for task in tasks)
    assert not storage.has_released(FakeTask("a", TOKENS))
    for task in tasks[:2]:
        storage.queued(task)
    assert [storage.holds(name) for name in "abcd"] == [False, False, True, True]
    assert names(storage.release(manager_of())) == ["c", "d"], "until it is said"


def test_released_requests_are_taken_once_in_order_of_arrival_and_none_when_fastdeploy_has_ended_all():
    """As a prefill server does, whose requests do not go to FastDeploy's queue."""
    storage, tier, told = storage_of()
    for name in "abc":
        storage.hold(FakeTask(name, TOKENS), "tokens")
    assert storage.take_released(3) == []
    storage.release_all()
    assert [names(storage.take_released(most)) for most in (0, -1, 2)] == [[], [], ["a", "b"]]
    assert [storage.holds(name) for name in "abc"] == [False, False, True]
    tier.startable.add("ahead")
    assert [storage.hold(FakeTask(name, TOKENS), "tokens") for name in ("held", "ahead")] == [True, False]
    told.clear()
    storage.clear()
    assert told == [("request_left", name) for name in ("held", *"abc", "ahead")], "the tier waits for none"
    assert (storage.take_released(3), storage.holds("held")) == ([], False)


def test_only_so_many_wait_and_the_others_are_fetched_for_all_the_same():
    storage, tier, told = storage_of()
    held = [storage.hold(FakeTask(f"r{number}", TOKENS), "tokens") for number in range(MOST_HELD + 1)]
    tier.startable.add("may start")
    held.append(storage.hold(FakeTask("may start", TOKENS), "tokens"))
    assert held == [True] * MOST_HELD + [False] * 2
    assert [each[1] for each in told if each[0] == "request_passes"] == [f"r{MOST_HELD}", "may start"]


def test_what_is_fetched_for_in_the_queue_is_left_when_it_is_scheduled_or_gone_and_no_other():
    storage, tier, told = storage_of()
    tasks, step = [FakeTask(name, TOKENS) for name in "abc"], SwapStep(4)
    tier.startable.update("abc")
    assert [storage.hold(task, "tokens") for task in tasks] == [False] * 3
    for scheduled, left in (([0], "a"), ([0, 1], "b"), ([0, 1], "")):
        told.clear()
        storage.batch_scheduled([tasks[number] for number in scheduled], step)
        assert told == [("step_taken", step), *[("request_left", name) for name in left], ("go_on",)]
    told.clear()
    storage.release(manager_of(tasks[2]))
    storage.release(manager_of())
    assert [each for each in told if each[0] == "request_left"] == [("request_left", "c")]


@pytest.mark.parametrize(("aborted", "unheard_s", "left"), [((), 600.0, []), (["a"], 600.0, ["a"]), ((), 0.0, ["a"])])
def test_request_without_a_seat_is_fetched_for_until_it_is_gone(monkeypatch, aborted, unheard_s, left):
    """FastDeploy's prefill server knows it once it has a seat."""
    monkeypatch.setattr(storage_module, "UNHEARD_S", unheard_s)
    storage, tier, told = storage_of()
    tier.startable.add("a")
    assert not storage.hold(FakeTask("a", TOKENS), "tokens")
    for _ in range(2):
        storage.release(manager_of(aborted=aborted))
    assert [each[1] for each in told if each[0] == "request_left"] == left


@pytest.mark.parametrize("follows_passes", [True, False])
def test_what_may_be_lost_is_doubted_where_passes_are_followed(follows_passes):
    storage, _, told = storage_of(follows_passes=follows_passes)
    storage.batch_lost()
    storage.rows_dropped()
    storage.cache_reset()
    doubts = [("doubt", {}), ("doubt", {"rows_stay": True}), ("cache_reset",), ("doubt", {})]
    assert told == (doubts if follows_passes else [("cache_reset",)])
    assert storage.follows_passes is follows_passes


@pytest.mark.parametrize("follows_passes", [True, False])
@pytest.mark.parametrize("unlisted_through", [-1, 0, 5])
def test_failed_copies_are_told_before_what_has_ended(follows_passes, unlisted_through):
    storage, _, told = storage_of(follows_passes=follows_passes)
    failed, progress = (CopyResult(3, *SWAP_OUT, 1, 0, 0.0, (7,), "injected"),), PassProgress(3, 1.0)
    reports = [(0, WorkerReport(failed, 0.0, 4, unlisted_through=unlisted_through)), (1, WorkerReport(passes=progress))]
    storage.copies_reported(reports)
    doubted = [("copies_doubted", unlisted_through)] * (unlisted_through >= 0)
    news = [("passes", 1, progress)] * follows_passes
    assert told == [*doubted, *(("copies_reported", *each) for each in reports), *news]


@pytest.mark.parametrize(
    ("rescheduled", "waiting", "wanted"),
    [((), 0, 0), (["gone"], 0, 0), (["p", "gone"], 0, 40), (["p"], 30, 40), (["p"], 50, 50), ((), 30, 30)],
)
def test_what_the_next_request_of_the_queue_needs_or_a_preempted_one_is_not_lent(rescheduled, waiting, wanted):
    storage, _, told = storage_of(follows_passes=True)
    line = [FakeTask("w", [1] * waiting), FakeTask("x", [1] * 99)] if waiting else []
    storage.release(manager_of(FakeTask("p", [1] * 40), waiting=line, rescheduled=rescheduled))
    assert told[0] == ("tokens_wanted", wanted)


@pytest.mark.parametrize(
    ("status", "is_held", "asked"), [("PREEMPTED", True, 0), ("PREEMPTED", False, 1), ("WAITING", True, 1)]
)
def test_a_preempted_request_waits_until_the_store_gave_its_blocks_back(status, is_held, asked):
    cache, (storage, tier, _) = make_adapter(32), storage_of()
    cache.storage, tier.holds_device_blocks = storage, is_held
    request, calls = FakeTask("p", TOKENS), []
    request.status = Status[status]
    resources = SimpleNamespace(cache_manager=cache, stop_flags=[True])
    for match in (seats.get_prefix_cached_blocks, engine_patches.get_prefix_cached_blocks_in_turn):
        assert match(lambda each: not calls.append(each), resources, (request,), {}) is bool(asked)
    assert len(calls) == 2 * asked


@pytest.mark.parametrize(("status", "number"), [("FINISHED", 1), ("PREEMPTED", 1), ("RUNNING", 1), ("WAITING", 0)])
@pytest.mark.parametrize("needs_token_ids", [True, False])
def test_whatever_ends_a_request_that_has_computed_is_told_with_its_tokens(status, number, needs_token_ids):
    """An abortion leaves the status as it is. A match that is taken back is no end."""
    cache, (storage, tier, told), task = make_adapter(32), storage_of(follows_passes=True), FakeTask("a", TOKENS)
    cache.storage, tier.needs_token_ids = storage, needs_token_ids
    if not number:
        cache.request_match_blocks(task, 4)
    else:
        begin(cache, task)
        cache.send_swaps([task])
        cache.batch_sent()
    task.status = Status[status]
    cache.release_block_ids(task)
    cache.release_block_ids(task)
    ended = [(tokens.num_plain_blocks, ids) for name, tokens, ids in [each for each in told if len(each) == 3]]
    assert ended == [(4, TOKENS if needs_token_ids else ())] * number


@pytest.mark.parametrize("follows_passes", [True, False])
def test_where_passes_are_followed_every_batch_carries_a_step_else_the_first_after_a_reset(follows_passes):
    cache = make_adapter(32)
    cache.storage, _, _ = storage_of(follows_passes=follows_passes)

    def carries():
        task = SimpleNamespace(request_id="a", task_type=SimpleNamespace(name="PREFILL"))
        cache.send_swaps([task])
        is_carrying = SWAP_ATTRIBUTE in vars(task)
        cache.batch_sent()
        return is_carrying

    before = carries()
    cache.reset()
    cache.send_swaps([])
    assert [before, carries(), carries()] == [follows_passes, True, follows_passes]


@pytest.mark.parametrize("is_paused", [True, False])
def test_only_a_paused_engine_gets_other_weights(monkeypatch, is_paused):
    monkeypatch.setattr(engine_patches, "EnginePrefixCache", SimpleNamespace)
    changed = []
    names = "manager", "storage"
    cache = SimpleNamespace(**{name: SimpleNamespace(weights_changed=partial(changed.append, name)) for name in names})
    engine = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=cache), is_paused=is_paused)
    assert engine_patches.control_other_weights(lambda request: request, engine, ("r",), {}) == "r"
    assert changed == list(names) * is_paused


# ---- the start, and names of blocks


def told_names(told):
    return [given[0] for name, *given in told if name == "use_namespace"]


def test_blocks_have_a_name_once_when_the_model_is_read():
    found = threading.Event()
    storage, _, told = storage_of(Link(), find_namespace=lambda: found.wait(30) and namespace())
    storage.start()
    storage.release(manager_of())
    assert told_names(told) == []
    found.set()
    while storage._namespace is None:
        pass
    for _ in range(2):
        storage.release(manager_of())
    assert told_names(told) == [namespace()]


def test_other_weights_empty_the_tier_before_anything_is_named_again():
    storage, _, told = storage_of(Link())
    storage.weights_changed()
    assert told == [("cache_reset",), ("forget_namespace",)], "of weights that change before a name is found"
    storage.start(run=lambda find: find())
    storage.release(manager_of())
    storage.weights_changed()
    epochs = [name.weight_epoch for name in told_names(told)]
    assert len({*epochs, namespace().weight_epoch}) == 3
    assert [each[0] for each in told[-3:]] == ["cache_reset", "forget_namespace", "use_namespace"]


def test_what_the_workers_answer_is_told_before_requests_are_let_go():
    link = Link()
    storage, _, told = storage_of(link)
    storage.start(run=lambda find: None)
    for answer in "xy":
        link.tell(answer)
    assert told == [], "on the thread that schedules"
    storage.release(manager_of())
    assert told == [("tokens_wanted", 0), ("answered", "x"), ("answered", "y"), ("look_again",), ("go_on",)]


def fails(error):
    def find():
        raise error

    return find


@pytest.mark.parametrize("error", [ModelError("no such file"), OSError("bug")])
def test_a_model_that_cannot_be_read_leaves_the_storage_off(caplog, error):
    storage, _, told = storage_of(find_namespace=fails(error))
    storage.start(run=lambda find: find())
    storage.release(manager_of())
    assert [message.partition(":")[0] for message in caplog.messages] == ["the storage tier stays off"]
    assert told_names(told) == []


def test_the_start_names_the_namespace_and_waits_for_every_rank():
    link = Link(Connected(1), Connected(0))
    storage, _, told = storage_of(link)
    storage.start_connected()
    assert (told_names(told), link.sent) == ([namespace()], [Connect])
    link.close = lambda: link.sent.append("closed")
    storage.close()
    assert link.sent == [Connect, "closed"]


@pytest.mark.parametrize(
    ("link", "find", "error", "reason"),
    [
        (Link(Connected(0), Connected(1, error="licence expired")), namespace, StorageError, r"expired \(rank 1\)"),
        (Link(Connected(0)), namespace, StorageError, "not ready on all ranks within 0 s"),
        (Link(is_ready=False), namespace, StorageError, "see log/workerlog"),
        (Link(), fails(ModelError("no weights")), ModelError, "no weights"),
    ],
    ids=["a rank cannot use it", "a rank does not answer", "no workers", "no name"],
)
def test_what_fails_the_start(monkeypatch, link, find, error, reason):
    for name in ("CONNECT_TIMEOUT_S", "WORKERS_TIMEOUT_S"):
        monkeypatch.setattr(storage_module, name, 0.01)
    with pytest.raises(error, match=reason):
        storage_of(link, find_namespace=find)[0].start_connected()
