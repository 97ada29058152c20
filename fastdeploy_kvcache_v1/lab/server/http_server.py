"""uvicorn with a ready line and an end in order."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from types import FrameType

import uvicorn
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


class HttpServer(uvicorn.Server):
    """Ends after the first signal, even if it arrives before `run_app`. Main thread only."""

    _engine: Engine
    _ready: str

    def __init__(self) -> None:
        self.ends_at: float | None = None
        """By `time.monotonic`, once there was a signal."""
        self._is_urgent = False
        super().__init__(
            uvicorn.Config(
                "set by run_app",
                log_config=None,
                access_log=False,  # the app logs requests with their ids
                lifespan="off",
                ws="none",
                limit_concurrency=MAX_CONNECTIONS,
                timeout_graceful_shutdown=FORCE_S,
            )
        )

    def run_app(self, app: FastAPI, engine: Engine, listener: socket.socket, ready: str) -> None:
        """Prints the line `ready` to standard output once it listens. Returns after a signal or `stop`."""
        self.config.app, self._engine, self._ready = app, engine, ready
        self.run(sockets=[listener])

    def stop(self) -> None:
        """End as after a signal. Any thread."""
        self.should_exit = True

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop; a second signal refuses open requests at once. uvicorn's own handler would answer them with 500."""
        self._is_urgent = self.should_exit
        if not self.should_exit:
            self.ends_at = time.monotonic() + END_S
            self.should_exit = True

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if not self.should_exit:
            print(self._ready, flush=True)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if (num_open := len(self.server_state.tasks)) and self.ends_at is not None:
            logger.warning(
                "stopping: open requests (%d) have %d s to end, then they get HTTP 503; a second signal refuses them",
                num_open,
                GRACE_S,
            )
        refusing = asyncio.create_task(self._refuse_late())
        try:
            await super().shutdown(sockets)
        finally:
            refusing.cancel()

    async def _refuse_late(self) -> None:
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and not self._is_urgent:
            await asyncio.sleep(SIGNAL_POLL_S)
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
