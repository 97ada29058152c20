"""Additions to FastDeploy's API server: routes of this package, and the header that names a session.

Processes of the API server check what clients send, and pass it to the engine as FastDeploy's control requests.
"""

from __future__ import annotations

import functools
import logging
import uuid
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from ...contract.cache_report import PATH as REPORT_PATH
from ...contract.plan import PATH as PLAN_PATH
from ...contract.sessions import SessionHint, checked_session_id, session_hint
from ...page.state import HEADERS, PAGE_PATH, STATE_PATH, document, state
from .. import Args, Kwargs, Wrapped
from ..cache_identity import RETURN, SALT, SESSION, checked_kind
from .adapter import PrefixCacheAdapter
from .patches import EnginePrefixCache, own_cache

HEADER = "X-Session-ID"
REQUEST = "control-kvcache-"
"""Beginning of the ids of our control requests."""
MOST_LOGGED = 300
"""Characters of a line in FastDeploy's log that names such an id."""


class Route(NamedTuple):
    method: str
    path: str
    """Below /v1, which FastDeploy's API keys guard."""
    read: Callable[[bytes], Any]
    """In the API server: the engine's argument, as JSON, of a body. Raises pydantic's `ValidationError`."""
    answer: Callable[[PrefixCacheAdapter, Any], dict[str, Any]]
    """In the engine, on the thread that takes requests in: it takes milliseconds."""


def _read_session(body: bytes) -> tuple[str, str, float]:
    """Digests stand for id and salt, which the logs of control requests must not have."""
    from pydantic import create_model

    fields: Any = {name: (checked_kind(name), ...) for name in (SESSION, RETURN)}
    fields[SALT] = (checked_kind(SALT) | None, None)
    told: Any = create_model("Told", **fields).model_validate_json(body)
    salt = (told.cache_salt or "").encode("utf-8", "surrogatepass")
    hint = session_hint(told.session_id, salt)
    return hint.name.hex(), hint.tenant.hex(), told.return_in_s


def _tell_return(cache: PrefixCacheAdapter, told: Any) -> dict[str, Any]:
    name, tenant, return_in_s = told
    return {"known": cache.manager.tell_return(SessionHint(bytes.fromhex(name), bytes.fromhex(tenant), return_in_s))}


def _report(cache: PrefixCacheAdapter, given: Any) -> dict[str, Any]:
    assert isinstance(cache, EnginePrefixCache)
    return msgspec.to_builtins(cache.manager.report(cache.publisher.parts()))  # type: ignore[no-any-return]


def _state(cache: PrefixCacheAdapter, given: Any) -> dict[str, Any]:
    assert isinstance(cache, EnginePrefixCache)
    stored = () if cache.storage is None else cache.storage.tier.known
    return state(cache.manager.report(cache.publisher.parts()), cache.manager.snapshot(stored=stored))


def _plan(cache: PrefixCacheAdapter, given: Any) -> dict[str, Any]:
    return msgspec.to_builtins(cache.planner.plan())  # type: ignore[no-any-return]


ROUTES = {
    "cache_session": Route("POST", "/v1/cache/session", _read_session, _tell_return),
    "cache_report": Route("GET", REPORT_PATH, lambda body: None, _report),
    "cache_state": Route("GET", STATE_PATH, lambda body: None, _state),
    "cache_plan": Route("GET", PLAN_PATH, lambda body: None, _plan),
}
"""By name of the control request. For a route `NAME`, the patch table adds `_control_NAME` to the engine."""


def add_control_methods(service: Any) -> None:
    """Extend `EngineService`, which has a method for each control request."""
    for name, route in ROUTES.items():
        setattr(service, f"_control_{name}", _control_method(route))


class Shortened(logging.Filter):
    """Shortens the lines in which FastDeploy logs answers: an open page asks every other second."""

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and len(record.msg) > MOST_LOGGED and REQUEST in record.msg:
            record.msg = f"{record.msg[:MOST_LOGGED]}..."
        return True


SHORTENED = Shortened()


def _control_method(route: Route) -> Callable[[Any, Any], dict[str, Any]]:
    def answer(service: Any, control_request: Any) -> dict[str, Any]:
        service.llm_logger.addFilter(SHORTENED)
        cache = own_cache(service, PrefixCacheAdapter)
        assert cache is not None, "FastDeploy uses another cache manager"
        return route.answer(cache, control_request.get_args()["given"])

    return answer


def with_cancellation(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps the decorator of completions and chats in the module that has the `app`."""

    def decorate(handler_func: Any) -> Any:
        app = handler_func.__globals__.get("app")
        if app is None:
            return wrapped(handler_func)
        _add_routes(app)

        @functools.wraps(handler_func)
        async def handle(request: Any, req: Any) -> Any:
            _name_session(request, req.headers.get(HEADER))
            return await handler_func(request, req)

        return wrapped(handle)

    return decorate(*args, **kwargs)


def _add_routes(app: Any) -> None:
    present = {route.path for route in app.routes}
    for name, route in ROUTES.items():
        if route.path not in present:
            app.add_route(route.path, functools.partial(_serve, name, route), methods=[route.method])
    if PAGE_PATH not in present:
        app.add_route(PAGE_PATH, _page)


async def _page(request: Any) -> Any:
    """Answer without asking the engine. No key guards this path, and the page has no data."""
    from fastapi.responses import HTMLResponse

    return HTMLResponse(document(), headers=HEADERS)


async def _serve(name: str, route: Route, request: Any) -> Any:
    """Answer a request. Raises `RequestValidationError`, of which FastDeploy makes status 400."""
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import JSONResponse
    from fastdeploy.engine.request import ControlRequest
    from fastdeploy.utils import api_server_logger
    from pydantic import ValidationError

    api_server_logger.addFilter(SHORTENED)
    try:
        given = route.read(await request.body())
    except ValidationError as error:
        raise RequestValidationError(error.errors(include_url=False, include_input=False)) from None
    client, request_id = request.app.state.engine_client, f"{REQUEST}{uuid.uuid4()}"
    try:
        response = await client.run_control_method(ControlRequest(request_id, name, {"given": given}))
    finally:
        await client.connection_manager.cleanup_request(request_id)  # FastDeploy forgets to
    return JSONResponse(response.result) if response.error_code == 200 else response.to_api_json_response()


def _name_session(body: Any, header: str | None) -> None:
    """Raises as `_serve` for a wrong header."""
    from fastapi.exceptions import RequestValidationError

    if body.session_id is None and header is not None:
        try:
            body.session_id = checked_session_id(header.encode("latin-1").decode(errors="replace"))
        except ValueError as error:
            raise RequestValidationError([{"loc": ("header", HEADER), "msg": f"{HEADER}: {error}"}]) from None
