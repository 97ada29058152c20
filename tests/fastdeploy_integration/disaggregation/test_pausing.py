"""Before a server with a role is paused, its requests and what it shares with peers end, or the pause fails."""

from concurrent.futures import ThreadPoolExecutor, TimeoutError
from threading import Lock
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import control_patches
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.patches import CACHES
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.pausing import STUCK_S, UNKNOWN_S, Gate, end_requests
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.role_caches import DecodeCache, PrefillCache

from .fake_requests import Output, engine, request

SILENCE_S = 4.0


def test_a_closed_gate_has_nobody_inside():
    gate = Gate()
    with ThreadPoolExecutor(1) as another:
        with gate.passing() as is_open:
            assert is_open
            closing = another.submit(gate.close)
            with pytest.raises(TimeoutError):
                closing.result(0.05)
        closing.result(30)
    with gate.passing() as is_open:
        assert not is_open


class Server:
    """A FAKE role whose requests end, or not, as time goes on."""

    silence_s = SILENCE_S

    def __init__(self, *known, requests=(), num_shared=0):
        self.gate, self.now, self.num_shared, self.num_ended, self.gave_up_at = Gate(), 0.0, num_shared, 0, []
        requests = {each: request(each) for each in requests}
        self.engine = engine(SimpleNamespace(cache_manager=self, requests=requests), *known)
        self.engine.is_paused = False
        self.later = []

    def at(self, seconds, action):
        self.later.append((seconds, action))

    def sleep(self, seconds):
        self.now += 0.5
        for due in [each for each in self.later if each[0] <= self.now]:
            self.later.remove(due)
            due[1]()

    def end(self, manager):
        self.num_ended += 1

    def give_up(self, manager):
        self.gave_up_at.append(self.now)

    def wait(self):
        end_requests(self.engine, self, Output, clock=lambda: self.now, sleep=self.sleep)

    @property
    def answers(self):
        return [(each.request_id, each.error_code, each.finished) for each in self.engine.scheduler.results]


@pytest.mark.parametrize("last", ["request", "lease"])
def test_a_pause_waits_for_the_last_request_and_the_last_block_that_a_peer_reads(last):
    server = Server(requests=["r"], num_shared=1)
    requests = server.engine.resource_manager.requests
    request_s, lease_s = (3.0, 2.0) if last == "request" else (2.0, 3.0)
    server.at(request_s, requests.clear)
    server.at(lease_s, lambda: setattr(server, "num_shared", 0))
    server.wait()
    assert server.now == 3.0
    assert server.num_ended > 1
    assert server.gave_up_at == []
    assert server.answers == []


def test_a_request_that_no_server_has_taken_up_is_answered():
    server = Server("here", "alone", requests=["here"])
    server.at(6.0, server.engine.resource_manager.requests.clear)
    server.at(6.0, lambda: server.engine.scheduler.requests.pop("here"))
    server.wait()
    assert server.answers == [("alone", 499, True)]
    assert server.now > 6.0 + UNKNOWN_S


def test_what_stands_still_is_given_up_and_a_pause_that_does_not_come_about_fails():
    server = Server("r", requests=["r"], num_shared=2)
    server.at(3.0, lambda: setattr(server, "num_shared", 1))
    with pytest.raises(CacheStateError, match="1 requests and 1 transfers have not ended"):
        server.wait()
    assert server.gave_up_at[:2] == [3.0 + SILENCE_S + 0.5, 3.0 + 2 * (SILENCE_S + 0.5)]
    assert server.now == 3.0 + STUCK_S + 0.5
    assert server.answers == []


def test_decode_aborts_each_request_once():
    aborts = {"to_be_aborted_req_id_set": {"b"}, "waiting_abort_req_id_set": set()}
    manager = SimpleNamespace(lock=Lock(), requests={each: request(each) for each in "abc"}, **aborts)
    DecodeCache.end(None, manager)
    assert manager.waiting_abort_req_id_set == {"a", "c"}


def test_a_request_that_waits_for_its_stored_prefix_at_prefill_goes_on_to_be_refused():
    """Its client waits at decode, which only a request that asks for room there is told of."""
    released = []
    PrefillCache.end(SimpleNamespace(storage=SimpleNamespace(release_all=lambda: released.append("all"))), None)
    assert released == ["all"]
    PrefillCache.end(SimpleNamespace(storage=None), None)


@pytest.fixture
def role(install, monkeypatch):
    """A FAKE role that the patches take for one of FastDeploy's."""
    requests = {"RequestOutput": Output, "ControlRequest": SimpleNamespace}
    install({"fastdeploy": {}, "fastdeploy.engine": {}, "fastdeploy.engine.request": requests})
    monkeypatch.setattr(control_patches, "RoleCache", Server)
    return Server()


def call(wrapper, role, control, argument="asked"):
    return wrapper(control, role.engine, (argument,), {})


@pytest.mark.parametrize("release", ["", "_with_request"])
def test_a_server_shares_nothing_from_its_pause_to_its_end(role, release):
    seen = []

    def fastdeploys(control_request):
        role.engine.is_paused = not role.gate.is_open
        seen.append((role.gate.is_open, control_request is not None))

    has_request = release != ""  # 2.6 would ask None for its id
    for name, is_open in (("pause", False), ("resume", True)):
        call(getattr(control_patches, name + release), role, fastdeploys, None)
        assert seen.pop() == (is_open, has_request)
        assert role.gate.is_open == is_open


def test_a_second_pause_ends_nothing_and_changes_nothing(role):
    role.engine.is_paused = True
    role.engine.resource_manager.requests["r"] = request("r")
    assert call(control_patches.pause, role, lambda control_request: "paused") == "paused"
    assert not role.gate.is_open


@pytest.mark.parametrize("fails", ["before", "inside"])
def test_a_server_whose_pause_fails_goes_on(role, monkeypatch, fails):
    def broken(*_):
        raise CacheStateError("no")

    if fails == "before":
        monkeypatch.setattr(control_patches, "end_requests", broken)
    with pytest.raises(CacheStateError):
        call(control_patches.pause, role, broken if fails == "inside" else lambda control_request: "paused")
    assert role.gate.is_open


def test_a_mixed_server_is_paused_by_fastdeploy_alone(role):
    mixed = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=object()))
    for wrapper in (control_patches.pause, control_patches.resume):
        assert wrapper(lambda control_request: "done", mixed, ("asked",), {}) == "done"


@pytest.mark.parametrize(
    ("role_name", "asked", "refused_id", "from_client", "is_told"),
    [
        # the server, what a client has asked of it, of which it refuses one, and whether decode hears it
        ("prefill", request("r"), "r", True, True),
        ("decode", request("r"), "r", True, False),
        ("mixed", request("r"), "r", True, False),
        ("prefill", request("r"), "another", True, False),
        ("prefill", SimpleNamespace(request_id="r", disaggregate_info=None), "r", True, False),
        ("prefill", {"request_id": "r"}, "r", True, False),
        ("prefill", request("r"), "r", False, False),
    ],
)
def test_a_decode_server_hears_which_request_a_paused_prefill_server_refuses(
    role, role_name, asked, refused_id, from_client, is_told
):
    told, sent = [], []
    connector = SimpleNamespace(send_first_token=lambda info, outputs: told.extend(outputs))
    manager = SimpleNamespace(cache_manager=CACHES[role_name].__new__(CACHES[role_name]))
    service = SimpleNamespace(split_connector=connector, resource_manager=manager)

    def _send_error_response(request_id, error_msg, error_code=500):
        sent.append((request_id, error_msg, error_code))

    def refuse():
        control_patches.refuse_request(_send_error_response, service, (refused_id, "paused"), {})

    def _insert_zmq_task_to_scheduler():
        request = asked  # noqa: F841  what the patch looks for
        refuse()

    (_insert_zmq_task_to_scheduler if from_client else refuse)()
    assert sent == [(refused_id, "paused", 500)]
    assert [(each.request_id, each.error_code, each.error_msg) for each in told] == [("r", 502, "paused")] * is_told
