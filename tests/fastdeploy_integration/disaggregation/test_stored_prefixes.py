"""A prefill server's requests wait for their stored prefix where they have no seat, and hold nobody up."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import patches
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.prefill_adapter import PrefillAdapter
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.stored_prefixes import StoredPrefixes
from tests.fastdeploy_integration.engine.by_hand import make_adapter

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


class Store:
    """Holds the requests whose id begins with "s"."""

    def __init__(self):
        self.held, self.released = {}, {}

    def holds(self, request_id):
        return request_id in self.held or request_id in self.released

    def waits(self, asked):
        if asked.request_id.startswith("s"):
            self.held[asked.request_id] = asked
        return asked.request_id in self.held

    def release(self, request_id):
        self.released[request_id] = self.held.pop(request_id)

    def take_released(self, most):
        return [self.released.pop(each) for each in list(self.released)[:most]]


@pytest.fixture
def server():
    made = SimpleNamespace(scheduler=Scheduler(), store=Store(), slept=[])
    made.prefixes = StoredPrefixes(made.scheduler, made.store, made.store.waits, made.slept.append)

    def get(batch=1):
        taken = made.prefixes.get_requests(made.scheduler.get_requests, 100, block_size=64, batch=batch)
        return [each.request_id for each in taken]

    made.get = get
    return made


def test_others_pass_one_that_waits_and_it_goes_on_when_its_prefix_is_here(server):
    server.scheduler.ids += ["s1", "a", "b"]
    assert [server.get() for _ in range(3)] == [[], ["a"], ["b"]]
    assert server.slept == []
    assert server.get() == [], "and does not wait for new ones"
    assert len(server.slept) == 1
    server.scheduler.ids.append("c")
    server.store.release("s1")
    assert [server.get() for _ in range(2)] == [["s1"], ["c"]]
    assert not server.store.holds("s1")


def test_two_threads_do_not_take_one_request(server):
    """The second would wait for another one, with what waits here."""
    both_looked = threading.Barrier(2)
    take = server.scheduler.get_requests

    def take_slowly(*args, **named):
        with suppress(threading.BrokenBarrierError):
            both_looked.wait(0.2)
        return take(*args, **named)

    server.scheduler.get_requests = take_slowly
    server.scheduler.ids.append("a")
    with ThreadPoolExecutor(2) as pool:
        assert sorted(pool.map(lambda _: server.get(), range(2))) == [[], ["a"]]


def test_there_are_never_more_than_seats_for_them(server):
    server.scheduler.ids += ["s1", "s2", "s3"]
    assert server.get(3) == []
    for each in ("s2", "s1", "s3"):
        server.store.release(each)
    assert server.get(0) == []
    assert server.get(2) == ["s2", "s1"]
    assert server.get(2) == ["s3"]


def test_the_second_of_two_with_one_id_does_not_take_the_place_of_the_first(server):
    server.scheduler.ids += ["s1"]
    assert server.get() == []
    first = server.store.held["s1"]
    server.scheduler.ids += ["s1"]
    assert server.get() == ["s1"]
    assert server.store.held["s1"] is first


TAKEN = {"prefill": [[], ["a"], ["b"]], "without storage": [["s1"], ["a"], ["b"]], "mixed": [["s1", "a"], ["b"]]}


@pytest.mark.parametrize("kind", TAKEN)
def test_a_thread_of_a_prefill_server_takes_one_request_which_may_have_waited_for_its_stored_prefix(kind):
    """With two it could have a seat for the first, and wait for one that another thread has in the same way."""
    cache = make_adapter(20) if kind == "mixed" else make_adapter(20, kind=PrefillAdapter)
    cache.storage = None if kind == "without storage" else Store()
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
