"""Our routes and header in an API server. FAKE engine client and answers to errors; FastAPI's own application."""

import json
import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.testclient import TestClient

from fastdeploy_kvcache_v1.contract.sessions import session_hint
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import api_server
from fastdeploy_kvcache_v1.page.state import document

from .by_hand import make_adapter

SECRET = "ada@example.org"
WRONG_ID = "a session id must be a text of 1 to 1024 characters; leave it out for none"


class ControlRequest:
    """FastDeploy's."""

    def __init__(self, request_id, method, args):
        self.request_id, self.method, self.args = request_id, method, json.loads(json.dumps(args))

    def get_args(self):
        return self.args


class EngineClient:
    """FastDeploy's, and the engine behind it."""

    def __init__(self):
        kind = type("EngineService", (), {})
        api_server.add_control_methods(kind)
        self.service, self.connection_manager = kind(), self
        self.service.resource_manager = SimpleNamespace(cache_manager=make_adapter(4))
        self.service.llm_logger = logging.getLogger("tests.engine")
        self.error, self.open, self.logged = None, set(), ""

    async def run_control_method(self, request):
        self.open.add(request.request_id)
        self.logged += str(vars(request))
        if self.error:
            content = {"error_message": self.error}
            return SimpleNamespace(error_code=500, to_api_json_response=lambda: JSONResponse(content, 500))
        result = getattr(self.service, f"_control_{request.method}")(request)
        line = f"done: {request.request_id} {result}"
        self.service.llm_logger.info(line)
        sys.modules["fastdeploy.utils"].api_server_logger.info(line)
        return SimpleNamespace(error_code=200, result=json.loads(json.dumps(result)))

    async def cleanup_request(self, request_id):
        self.open.remove(request_id)


async def refuse(_, error):
    first = error.errors()[0]  # as FastDeploy does
    return JSONResponse({"message": first["msg"], "param": first["loc"][-1] if first["loc"] else None}, 400)


@pytest.fixture
def server(monkeypatch):
    """Two endpoints that answer with the body's session. `told`: what the manager, which knows "known", was told."""
    monkeypatch.setitem(sys.modules, "fastdeploy", ModuleType("fastdeploy"))
    for name in ("fastdeploy.engine", "fastdeploy.engine.request", "fastdeploy.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["fastdeploy.utils"].api_server_logger = logging.getLogger("tests.api_server")
    sys.modules["fastdeploy.engine.request"].ControlRequest = ControlRequest
    app, engine, told = FastAPI(), EngineClient(), []
    app.state.engine_client = engine
    app.add_exception_handler(RequestValidationError, refuse)
    monkeypatch.setitem(globals(), "app", app)

    async def completion(request: dict, req: Request):
        return request.session_id

    async def chat(request: dict, req: Request):
        return request.session_id

    def tell_return(session):
        told.append(session)
        return session.name == session_hint("known").name

    def of_body(handle):
        async def endpoint(req: Request):
            return await handle(request=SimpleNamespace(**await req.json()), req=req)

        return endpoint

    monkeypatch.setattr(engine.service.resource_manager.cache_manager.manager, "tell_return", tell_return)
    for handler in (completion, chat):
        handle = api_server.with_cancellation(lambda decorated: decorated, None, (handler,), {})
        app.post(f"/v1/{handler.__name__}")(of_body(handle))
    return SimpleNamespace(client=TestClient(app), app=app, engine=engine, told=told)


def ask(server, session_id, **headers):
    answer = server.client.post("/v1/completion", json={"session_id": session_id}, headers=headers)
    return answer.status_code, answer.json()


def test_header_names_the_session_of_a_body_that_does_not(server):
    assert ask(server, None) == (200, None)
    assert ask(server, None, **{"X-Session-ID": "Gespräch".encode()}) == (200, "Gespräch")
    assert ask(server, "b", **{"X-Session-ID": SECRET * 100}) == (200, "b")


@pytest.mark.parametrize("value", ["", SECRET * 100])
def test_wrong_header_is_refused_in_one_line_without_its_value(server, value):
    refused = {"message": f"X-Session-ID: {WRONG_ID}", "param": "X-Session-ID"}
    assert ask(server, None, **{"X-Session-ID": value}) == (400, refused)


def tell(server, **body):
    answer = server.client.post("/v1/cache/session", json=body)
    return answer.status_code, answer.json()


def test_time_of_return_reaches_the_manager_and_leaves_nothing_behind(server):
    assert tell(server, session_id="known", return_in_s=2.5) == (200, {"known": True})
    assert tell(server, session_id="known", return_in_s=-1, cache_salt="salt") == (200, {"known": False})
    assert tell(server, session_id="other", return_in_s=0, cache_salt=None) == (200, {"known": False})
    assert server.told == [
        session_hint("known", return_in_s=2.5),
        session_hint("known", b"salt", -1),
        session_hint("other", return_in_s=0),
    ]
    assert not server.engine.open


def test_control_request_has_neither_id_nor_salt(server):
    assert tell(server, session_id=SECRET, return_in_s=1, cache_salt=f"salt of {SECRET}")[0] == 200
    assert "cache_session" in server.engine.logged
    assert SECRET not in server.engine.logged


def test_long_answer_is_cut_off_in_both_logs(server, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    plan = {"sizes": [{"tier": "a" * 40}] * 512}
    planner = server.engine.service.resource_manager.cache_manager.planner
    monkeypatch.setattr(planner, "plan", lambda: plan)
    assert server.client.get("/v1/cache/plan").json() == plan
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("tests.")]
    assert [len(line) for line in lines] == [303, 303]


def test_page_is_served_without_the_engine(server):
    answer = server.client.get("/debug/cache")
    assert (answer.status_code, answer.text) == (200, document())
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert not server.engine.logged


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"return_in_s": 1}, "session_id"),
        ({"session_id": "a"}, "return_in_s"),
        *(({"session_id": each, "return_in_s": 1}, "session_id") for each in ("", None, 7, [SECRET], SECRET * 100)),
        *(({"session_id": "a", "return_in_s": each}, "return_in_s") for each in (-2, None, "1", True, 1e300)),
        *(({"session_id": "a", "return_in_s": 1, "cache_salt": each}, "cache_salt") for each in ("", 7)),
    ],
)
def test_wrong_time_of_return_is_refused_before_the_engine_hears_of_it(server, body, param):
    status, error = tell(server, **body)
    assert (status, error["param"]) == (400, param)
    assert "\n" not in error["message"]
    assert SECRET not in error["message"]
    assert not server.engine.logged


def test_body_that_is_no_json_is_refused(server):
    assert server.client.post("/v1/cache/session", content=b"{").status_code == 400


def test_error_of_the_engine_is_passed_on(server):
    server.engine.error = "it broke"
    assert tell(server, session_id="a", return_in_s=1) == (500, {"error_message": "it broke"})
    assert not server.engine.open


@pytest.mark.parametrize("path", ["/v1/cache/session", "/debug/cache"])
def test_route_is_added_once(server, path):
    assert [route.path for route in server.app.routes].count(path) == 1


def test_handler_of_a_module_without_an_app_is_left_alone():
    async def handler(request, req):
        raise NotImplementedError

    assert api_server.with_cancellation(lambda decorated: decorated, None, (handler,), {}) is handler
