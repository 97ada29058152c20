"""The description of the API in /openapi.json and /docs, made from the types of requests and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import HTMLResponse
from pydantic import BaseModel

from ... import __version__
from .engine.generation import Delta, Usage
from .responses import Answer

Function = TypeVar("Function", bound=Callable[..., Any])

DESCRIPTION = (
    "OpenAI's API with FastDeploy's extensions, and the prefix cache behind it. A field that would change the answer "
    "and is not supported is refused with 400. `docs/lab/server.md` of the project lists all fields."
)
OFFLINE = (
    "<p>This page loads its scripts from cdn.jsdelivr.net. Without internet it shows this line alone: read "
    '<a href="openapi.json">openapi.json</a> instead.</p>'
)


class ErrorDetail(BaseModel):
    message: str
    """One line."""
    type: str
    param: str | None
    """The field that was refused."""
    code: str | None


class ErrorBody(BaseModel):
    """Every answer with a status from 400 on."""

    error: ErrorDetail


ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "The request is refused: correct it"},
    "5XX": {"model": ErrorBody, "description": "The server cannot answer: the message says why"},
}


def described_app() -> FastAPI:
    """An app without routes except those that describe it."""
    app = FastAPI(
        title="fastdeploy-kvcache embedded server",
        version=__version__,
        description=DESCRIPTION,
        responses=ERRORS,
        docs_url=None,
        redoc_url=None,
    )

    @readable(app, "/version")
    async def version() -> dict[str, str]:
        """The version of fastdeploy-kvcache-v1."""
        return {"version": __version__}

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        page = get_swagger_ui_html(openapi_url="openapi.json", title=app.title, swagger_favicon_url="data:,")
        return HTMLResponse(bytes(page.body).decode().replace("<body>", f"<body>{OFFLINE}"))

    return app


def readable(app: FastAPI, path: str, **options: Any) -> Callable[[Function], Function]:
    """Decorate a route for GET, and for HEAD without a second description."""

    def add(function: Function) -> Function:
        app.head(path, include_in_schema=False)(function)
        return app.get(path, **options)(function)

    return add


def answers(*, is_chat: bool) -> dict[int | str, dict[str, Any]]:
    """The success of a generation, with an example for both forms."""
    example = Answer("cmpl-1", "model", is_chat=is_chat, created=0).whole(
        [Delta(" Paris.", (7, 8), "stop", Usage(prompt_tokens=70, completion_tokens=2, cached_tokens=64))]
    )
    text = "The answer. With `stream`: its parts as server-sent events, then `data: [DONE]`"
    return {200: {"description": text, "content": {"application/json": {"example": example}, "text/event-stream": {}}}}
