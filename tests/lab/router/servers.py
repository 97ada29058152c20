"""Small real servers on ports of this machine, and the router before them, all on one event loop."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field

import httpx2

from fastdeploy_kvcache_v1.lab.router.app import Forwarder, HttpServer

SECRET = b"sixteen bytes or more"
EVENTS = "text/event-stream"


@dataclass
class Asked:
    """One request as a server has read it."""

    line: str
    headers: dict[str, str]
    body: bytes
    writer: asyncio.StreamWriter
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """The router has closed the connection."""

    def start(self, status: int = 200, **headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", *(f"{name.replace('_', '-')}: {value}" for name, value in headers.items())]
        self.writer.write("\r\n".join([*lines, "", ""]).encode())

    def say(self, status: int, body: object, **headers: str) -> None:
        """A whole answer."""
        text = json.dumps(body)
        self.start(status, content_type="application/json", content_length=str(len(text)), **headers)
        self.writer.write(text.encode())


Act = Callable[[Asked], Awaitable[None]]


class Backend:
    """A server that does what `act` says with a request, and then closes the connection."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.act: Act = self.well
        self.health: Act = self.well
        self.asked: list[Asked] = []
        self.num_looks = 0
        self._serving: set[asyncio.Task[None]] = set()

    async def well(self, asked: Asked) -> None:
        asked.say(200, {"from": self.name})

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Listens no more, and leaves what it has begun."""
        self._server.close()
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:] if line)}
            asked = Asked(head[0], headers, await reader.readexactly(int(headers.get("content-length", 0))), writer)
            watch = asyncio.ensure_future(self._until_closed(reader, asked))
            if " /health " in asked.line:
                self.num_looks += 1
                await self.health(asked)
            else:
                self.asked.append(asked)
                await self.act(asked)
            await writer.drain()
            writer.close()
            await watch
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    @staticmethod
    async def _until_closed(reader: asyncio.StreamReader, asked: Asked) -> None:
        with suppress(OSError):
            await reader.read()
        asked.closed.set()


class Scene:
    """Two prefill servers, two decode servers, and the router; `client` asks it."""

    def __init__(self, silence_s: float) -> None:
        self.prefills = [Backend(f"p{number}") for number in range(2)]
        self.decodes = [Backend(f"d{number}") for number in range(2)]
        self._silence_s = silence_s

    async def __aenter__(self) -> Scene:
        async with AsyncExitStack() as stack:
            for backend in (*self.prefills, *self.decodes):
                await backend.start()
                stack.push_async_callback(backend.stop)
            urls = [[each.url for each in group] for group in (self.prefills, self.decodes)]
            self.forwarder = Forwarder(*urls, SECRET, silence_s=self._silence_s)
            self.server = HttpServer(self.forwarder)
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            self.client = await stack.enter_async_context(
                httpx2.AsyncClient(base_url=self.url, timeout=30.0, trust_env=False)
            )
            self.running = asyncio.ensure_future(self.server.serve(sockets=[listener]))
            stack.push_async_callback(self._end)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def _end(self) -> None:
        self.server.should_exit = True
        await self.running

    async def ask(self, **body: object) -> httpx2.Response:
        return await self.client.post("/v1/completions", json={"prompt": "x", **body})

    def asked(self) -> list[Asked]:
        """What the decode servers were asked."""
        return [asked for each in self.decodes for asked in each.asked]

    def open(self) -> tuple[int, int]:
        """Open requests of all prefill and of all decode servers."""
        groups = self.forwarder.prefills, self.forwarder.decodes
        prefill, decode = (sum(each.num_open for each in group) for group in groups)
        return prefill, decode

    def answering(self) -> set[str]:
        known = {each.url: each.answers for each in (*self.forwarder.prefills, *self.forwarder.decodes)}
        return {each.name for each in (*self.prefills, *self.decodes) if known[each.url]}


async def until(condition: Callable[[], object], what: str) -> None:
    deadline = asyncio.get_running_loop().time() + 20
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, what
        await asyncio.sleep(0.005)
