"""The engine's patches for roles against FAKE objects of FastDeploy."""

import socket
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import patches
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.pausing import DECODE_PAUSED, PREFILL_PAUSED, Gate
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.prefill_adapter import PrefillAdapter
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import INPUTS, KEY, name_of
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Where
from tests.fastdeploy_integration.engine.by_hand import make_adapter

from .decode_server import DecodeServer
from .fake_requests import Output, request


def decode_server():
    """Whose room is asked for as FastDeploy asks."""
    server = DecodeServer()
    manager = server.manager
    server.ask = lambda made: patches.preallocate_in_decode(server.allocate, manager, (made,), {})
    return server


def test_a_request_that_is_sent_twice_gets_blocks_once_and_another_of_its_id_gets_none():
    """And at a paused server nobody gets any."""
    server, first = decode_server(), request("r")
    assert server.ask(first)
    again = request("r", name=name_of(first))
    assert server.ask(again)
    assert again.disaggregate_info["block_tables"] == first.block_tables
    assert not server.ask(request("r"))
    server.cache.gate.close()
    assert not server.ask(request("other"))
    assert not server.ask(request("r", name=name_of(first)))
    assert (len(server.cache.gpu_free_block_list), len(server.sent)) == (17, 1)
    server.cache.gate.open()
    assert server.ask(request("other"))


@pytest.mark.parametrize("data", [None, *({KEY: name} for name in (5, "", "x" * 1000))])
def test_a_request_without_a_name_gets_nothing(data):
    server = decode_server()
    assert not server.ask(request("r", name="x", ic_req_data=data))
    assert server.manager.requests == {}


def test_a_request_gets_another_name_each_time_that_it_is_taken_up_and_one_of_a_live_id_waits():
    manager, first, second = decode_server().manager, request("r"), request("r")

    def preallocate_resource_in_p(made):
        made.idx = len(manager.tasks_list)
        manager.tasks_list.append(made)
        manager.requests[made.request_id] = made
        return True

    def preallocate(made):
        return patches.preallocate_in_prefill(preallocate_resource_in_p, manager, (made,), {})

    given = name_of(first)
    assert preallocate(first)
    assert name_of(first) not in (None, given)
    assert not preallocate(second)
    manager.tasks_list[first.idx] = None  # it ended
    assert preallocate(second)


class Connector:
    """FastDeploy's SplitwiseConnector of a prefill server, whose peer answers what it is told to."""

    def __init__(self, answers, *, closes_when_asked=False):
        self.answers, self.asked, self.errors, self.current_request_ids = list(answers), 0, [], {"r": "init"}
        self.gate, self.closes_when_asked = Gate(), closes_when_asked
        self.resource_manager = SimpleNamespace(cache_manager=self)

    def check_decode_allocated(self, task):
        return self.answers.pop(0)

    def send_splitwise_tasks(self, tasks, current_id):
        self.asked += 1
        if self.closes_when_asked:
            self.gate.close()

    def send_first_token(self, info, outputs):
        self.errors += [(each.request_id, each.finished, each.error_code, each.error_msg) for each in outputs]

    def ask(self, port):
        self.task = task = request("r")
        task.disaggregate_info |= {"decode_ip": "127.0.0.1", "decode_connector_port": port}
        return patches.ask_for_room(self.check_decode_allocated, self, (task,), {})


@pytest.fixture(autouse=True)
def fastdeploy(install, monkeypatch):
    install({"fastdeploy": {}, "fastdeploy.engine": {}, "fastdeploy.engine.request": {"RequestOutput": Output}})
    monkeypatch.setattr(patches, "ASK_AGAIN_S", 0.0)
    monkeypatch.setattr(patches, "PrefillCache", Connector)


@pytest.fixture(scope="module")
def port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


FULL = False, patches.NO_ROOM
LATE = False, "prefill waits for decode resource timeout"
NO = "the decode server gives r no room: "
PAUSED = False, PREFILL_PAUSED


@pytest.mark.parametrize(
    ("answers", "paused", "full_s", "result", "told", "asked_again"),
    [
        # what decode says, when this server is paused, for how long decode may be full; what FastDeploy and decode hear
        ([FULL, FULL, (True, "")], None, 600.0, (True, ""), None, 2),
        ([FULL], None, 0.0, FULL, f"{NO}{patches.NO_ROOM}", 0),  # the router would let it wait as long again
        ([LATE], None, 600.0, LATE, f"PD Error: {NO}{LATE[1]}", 0),
        ([], "before", 600.0, PAUSED, f"PD Error: {PREFILL_PAUSED}", 0),
        ([FULL, (True, "")], "while it asks", 600.0, PAUSED, f"PD Error: {PREFILL_PAUSED}", 1),
    ],
)
def test_how_long_prefill_asks_for_room(port, monkeypatch, answers, paused, full_s, result, told, asked_again):
    monkeypatch.setattr(patches, "FULL_S", full_s)
    connector = Connector(answers, closes_when_asked=paused == "while it asks")
    if paused == "before":
        connector.gate.close()
    assert connector.ask(port) == result
    assert connector.errors == ([] if told is None else [("r", True, 502, told)])
    assert connector.asked == asked_again
    assert (INPUTS in connector.task.ic_req_data) == (not result[0]), "as long as decode may need them"
    assert ("r" in connector.current_request_ids) == (paused is None)


def test_a_decode_server_that_is_gone_is_not_waited_for():
    connector = Connector([])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    granted, reason = connector.ask(port)
    assert not granted
    assert "cannot be reached: Connection refused" in reason
    assert connector.current_request_ids == {}


def test_a_request_that_no_router_sent_is_refused():
    connector, task = Connector([]), request("r")
    task.disaggregate_info = None
    granted, reason = patches.ask_for_room(connector.check_decode_allocated, connector, (task,), {})
    assert not granted
    assert "send requests to the router" in reason


@pytest.mark.parametrize("paused", [False, True])
def test_prefill_hears_that_there_is_no_room(paused):
    """2.5 sends only what was granted."""
    sent, granted, gate = [], [], Gate()
    if paused:
        gate.close()
    reason = DECODE_PAUSED if paused else patches.NO_ROOM
    cache = DecodeServer().cache
    cache.gate = gate
    manager = SimpleNamespace(cache_manager=cache)
    connector = SimpleNamespace(_send_message=lambda *message: sent.append(message), resource_manager=manager)
    full, fits = request("full"), request("fits")
    full.error_msg = patches.NO_ROOM
    patches.tell_prefill(granted.extend, connector, ([full, fits],), {})
    assert granted == [fits]
    assert sent == [("127.0.0.1:1", "cache_sync", [{"request_id": "full", "error_msg": reason}])]


@pytest.mark.parametrize(("role", "blocks", "needed"), [("decode", 0, 0), ("decode", 1, 11), ("mixed", 0, 10)])
def test_a_full_decode_server_starts_what_has_its_blocks(role, blocks, needed):
    cache = DecodeServer().cache if role == "decode" else make_adapter(20)
    manager = SimpleNamespace(cache_manager=cache)
    assert patches.blocks_to_start(lambda count: count + 10, manager, (blocks,), {}) == needed


@pytest.mark.parametrize("given", [((2, "decode"), {}), ((2,), {"splitwise_role": "prefill"}), ((2,), {})])
def test_the_role_decides_which_cache_manager_a_complete_overlay_makes(monkeypatch, given):
    required, (args, kwargs) = [], given
    monkeypatch.setattr(patches.overlay, "active", lambda: SimpleNamespace(require_complete=required.append))
    for role in patches.CACHES:
        monkeypatch.setitem(patches.CACHES, role, lambda config, role=role: (role, config))
    role = kwargs.get("splitwise_role", [*args, "mixed"][1])
    assert patches.make_cache_manager(None)("config", *args, **kwargs) == (role, "config")
    assert required == [Where.ENGINE]


@pytest.mark.parametrize("is_prefill", [True, False])
def test_a_request_of_a_prefill_server_is_matched_when_it_is_put_into_the_batch(is_prefill):
    cache, started = make_adapter(20, kind=PrefillAdapter) if is_prefill else make_adapter(20), []
    cache.start = lambda *given: started.append(given)
    manager = SimpleNamespace(cache_manager=cache, get_prefix_cached_blocks="FastDeploy's match")
    computes = lambda made, budget: (made, budget)  # noqa: E731
    assert patches.tokens_to_compute(computes, manager, ("r", 16), {}) == ("r", 16)
    assert started == ([("r", "FastDeploy's match")] if is_prefill else [])


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("role", ["decode", "mixed"])
def test_a_decode_engine_takes_what_prefill_sends_by_way_of_its_blocks(install, monkeypatch, role, counts):
    cache, ended = DecodeServer().cache if role == "decode" else make_adapter(20), []
    gauge = SimpleNamespace(dec=lambda: ended.append(True))
    metrics = SimpleNamespace(decode_preallocated_req_num=gauge)
    install({"fastdeploy.metrics": {}, "fastdeploy.metrics.metrics": {"main_process_metrics": metrics}})
    table = SimpleNamespace(capabilities=SimpleNamespace(counts_preallocated=counts))
    monkeypatch.setattr(patches.overlay, "active", lambda: SimpleNamespace(table=table))
    made = []

    class Tokens:
        def __init__(self, engine, of, output, on_end):
            made.append((engine, of, output))
            self.on_end = on_end
            self.is_empty, self.take = (lambda ask: ("asked", ask())), (lambda take: ("took", take()))
            on_end()

    monkeypatch.setattr(patches, "FirstTokens", Tokens)
    queue = SimpleNamespace(disaggregate_queue_empty=lambda: True, get_disaggregated_tasks=lambda: ["task"])
    engine = SimpleNamespace(resource_manager=SimpleNamespace(cache_manager=cache), engine_worker_queue=queue)
    assert patches.process_in_decode(lambda: "started", engine, (), {}) == "started"
    told = queue.disaggregate_queue_empty(), queue.get_disaggregated_tasks()
    if role == "decode":
        assert told == (("asked", True), ("took", ["task"]))
        assert (made, ended) == ([(engine, cache, Output)], [True] * counts)
    else:
        assert (told, made) == ((True, ["task"]), [])
