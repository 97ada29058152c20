"""uvicorn with an end in order and a ready line."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import socket
import time
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn

if TYPE_CHECKING:  # the router needs none of them
    from fastapi import FastAPI

    from .engine.engine import Engine
    from .settings import ServerConfig

logger = logging.getLogger(__name__)

GRACE_S = 4
"""After a signal, running requests have this long to end before they are answered with 503."""

FORCE_S = GRACE_S + 2
"""After this long, connections are cut."""

END_S = 8
"""After a signal, the server has ended by then: `docker stop` kills it after 10 s."""

SIGNAL_POLL_S = 0.05

MAX_CONNECTIONS = 512
"""Open connections at the same time; uvicorn refuses more with 503."""

TRY_PROMPT = (
    "A prefix cache keeps the keys and values of the prompts it has seen. When a prompt starts with the same words, "
    "the server does not compute them again: it finds the blocks, shares them, and goes on from there. "
    "Send this request twice, and the second answer reports its cached tokens. So the moral of the story is"
)
"""Longer than one block of 64 tokens in any tokenizer, and free of quotes."""

TRY_QUESTION = "What is the capital of France?"
"""Free of quotes, too."""


class TwoSignalServer(uvicorn.Server):
    """Ends after a signal, once open requests have ended. A second signal, or `grace_s`, refuses them."""

    def __init__(self, app: Any, *, grace_s: float = math.inf, **options: Any) -> None:
        super().__init__(uvicorn.Config(app, log_config=None, access_log=False, ws="none", **options))
        self._grace_s = grace_s
        self._is_urgent = False

    async def refuse(self) -> None:
        """End open requests."""
        raise NotImplementedError

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """uvicorn's handler would raise the signal again at the end, and the exit status would not be 0."""
        self._is_urgent = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if num_open := len(self.server_state.tasks):
            limit = "" if math.isinf(self._grace_s) else f", or get HTTP 503 after {self._grace_s:g} s"
            logger.warning("stopping: open requests (%d) end first%s; a second signal refuses them", num_open, limit)
        refusing = asyncio.create_task(self._refuse_late())
        try:
            await super().shutdown(sockets)
        finally:
            refusing.cancel()

    async def _refuse_late(self) -> None:
        deadline = time.monotonic() + self._grace_s
        while time.monotonic() < deadline and not self._is_urgent:
            await asyncio.sleep(SIGNAL_POLL_S)
        await self.refuse()


class HttpServer(TwoSignalServer):
    """Ends after a signal even if it arrives before `run_app`. Main thread only."""

    _engine: Engine
    _ready: str

    def __init__(self) -> None:
        super().__init__(
            "set by run_app",
            grace_s=GRACE_S,
            lifespan="off",
            limit_concurrency=MAX_CONNECTIONS,
            timeout_graceful_shutdown=FORCE_S,
        )
        self.ends_at: float | None = None
        """By `time.monotonic`, once there was a signal."""

    def run_app(self, app: FastAPI, engine: Engine, listener: socket.socket, ready: str) -> None:
        """Prints the line `ready` to standard output once it listens. Returns after a signal or `stop`."""
        self.config.app, self._engine, self._ready = app, engine, ready
        self.run(sockets=[listener])

    def stop(self) -> None:
        """End as after a signal. Any thread."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self.ends_at = time.monotonic() + END_S
        super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            print(self._ready, flush=True)

    async def refuse(self) -> None:
        self._engine.refuse("the server is shutting down")


def ready_line(config: ServerConfig, address: tuple[str | int, ...], *, chats: bool) -> str:
    """One line: where the server is, what it serves, and a command to paste."""
    host, port = str(address[0]), address[1]
    host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    url = f"http://{host}:{port}"
    note = " (a small random model, its text means nothing)"
    asked = {"messages": [{"role": "user", "content": TRY_QUESTION}]} if chats else {"prompt": TRY_PROMPT}
    path = "/v1/chat/completions" if chats else "/v1/completions"
    body = json.dumps({**asked, "max_tokens": 16, "temperature": 0})
    return (
        f"Ready: {url} serves {config.served_model_name}{note if config.is_random_model else ''}. "
        f"Try: curl {url}{path} -H 'Content-Type: application/json' -d '{body}'"
    )
