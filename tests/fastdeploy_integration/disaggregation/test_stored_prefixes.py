"""A prefill server's requests wait for their stored prefix where they have no seat, and hold nobody up."""

import threading
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import patches
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.prefill_adapter import PrefillAdapter
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.stored_prefixes import StoredPrefixes
from tests.fastdeploy_integration.engine.by_hand import make_adapter
from tests.fastdeploy_integration.engine.test_storage import manager_of, storage_of

from .fake_requests import request


class Scheduler:
    """FastDeploy's LocalScheduler, as FAKE: what it waits for without end is an error here."""

    def __init__(self, *ids):
        self.mutex = threading.Lock()
        self.ids, self.ids_read_cursor = list(ids), 0

    def get_requests(self, available_blocks, block_size, batch=1):
        assert self.ids_read_cursor < len(self.ids), "it would wait for new ones"
        taken = self.ids[self.ids_read_cursor : self.ids_read_cursor + batch]
        self.ids_read_cursor += len(taken)
        return [request(each) for each in taken]


def store():
    """It holds the requests whose id begins with "s"; `let_go(request_id)` releases one."""
    made, tier, _ = storage_of()
    made.waits = lambda asked: asked.request_id.startswith("s") and made.hold(asked, "tokens")
    made.let_go = lambda request_id: tier.startable.add(request_id) or made.release(manager_of())
    return made


@pytest.fixture
def server():
    made = SimpleNamespace(scheduler=Scheduler(), store=store(), slept=[])
    made.prefixes = StoredPrefixes(made.scheduler, made.store, made.store.waits, made.slept.append)

    def get(*ids, batch=1):
        """When these have come."""
        made.scheduler.ids += ids
        taken = made.prefixes.get_requests(made.scheduler.get_requests, 100, block_size=64, batch=batch)
        return [each.request_id for each in taken]

    made.get = get
    return made


def test_others_pass_one_that_waits_and_it_goes_on_when_its_prefix_is_here(server):
    assert [server.get("s1", "a", "b"), server.get(), server.get()] == [[], ["a"], ["b"]]
    assert server.slept == []
    assert server.get() == [], "and does not wait for new ones"
    assert len(server.slept) == 1
    first = server.store._held["s1"]
    assert server.get("s1") == ["s1"], "the second of one id does not wait"
    assert server.store._held["s1"] is first
    server.store.let_go("s1")
    assert [server.get("c"), server.get()] == [["s1"], ["c"]]
    assert not server.store.holds("s1")


def test_there_are_never_more_than_seats_for_them(server):
    assert server.get("s1", "s2", "s3", batch=3) == []
    for each in ("s2", "s1", "s3"):
        server.store.let_go(each)
    assert [server.get(batch=seats) for seats in (0, 2, 2)] == [[], ["s2", "s1"], ["s3"]]


TAKEN = {"prefill": [[], ["a"], ["b"]], "without storage": [["s1"], ["a"], ["b"]], "mixed": [["s1", "a"], ["b"]]}


@pytest.mark.parametrize("kind", TAKEN)
def test_a_thread_of_a_prefill_server_takes_one_request_which_may_have_waited_for_its_stored_prefix(kind):
    """With two it could have a seat for the first, and wait for one that another thread has in the same way."""
    cache = make_adapter(20) if kind == "mixed" else make_adapter(20, kind=PrefillAdapter)
    cache.storage = None if kind == "without storage" else store()
    if cache.storage is not None:
        cache.waits_for_storage = cache.storage.waits
    scheduler = Scheduler("s1", "a", "b")
    service = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=cache), scheduler=scheduler)

    def start_zmq_service(api_server_pid=None):
        return f"started {api_server_pid}"

    assert patches.take_requests(start_zmq_service, service, (5,), {}) == "started 5"

    def take(batch=2):
        return [each.request_id for each in scheduler.get_requests(100, block_size=64, batch=batch)]

    assert [take() for _ in TAKEN[kind]] == TAKEN[kind]
    scheduler.ids.append("c")
    assert take(batch=0) == [], "there is no seat"
