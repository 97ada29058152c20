"""Servers that requests are sent to: which ones answer, and how busy each is with requests of this router."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Sequence

import anyio
import httpx

__all__ = ["Server", "ServerGroup"]

logger = logging.getLogger(__name__)


class Server:
    """Event loop only."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.is_alive = False
        """It answered the last look. Nobody is asked before the first one."""
        self.num_open = 0
        """Requests of this router that it is busy with."""
        self.lost = asyncio.Event()
        """Set when it stops answering: whoever waits for it then waits in vain. Each life has its own."""

    def set_alive(self, is_alive: bool, reason: str = "") -> None:
        """What the last look, or a request, has shown."""
        if is_alive == self.is_alive:
            return
        self.is_alive = is_alive
        if is_alive:
            self.lost = asyncio.Event()
            logger.warning("%s answers", self.url)
        else:
            self.lost.set()
            logger.warning("%s is left out until it answers: %s", self.url, reason)


class ServerGroup:
    """Servers of one role. Event loop only."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.servers = [Server(url) for url in urls]

    def choose(self, without: Collection[Server] = ()) -> Server | None:
        """One that answers, with the fewest open requests; of equal ones, each in turn. None if no one does."""
        candidates = [each for each in self.servers if each.is_alive and each not in without]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda each: each.num_open)
        self.servers.remove(chosen)
        self.servers.append(chosen)
        return chosen

    async def watch(self, http: httpx.AsyncClient, *, interval_s: float, timeout_s: float) -> None:
        """Look at every server again and again, until cancelled."""
        await asyncio.gather(*(self._watch(each, http, interval_s, timeout_s) for each in tuple(self.servers)))

    async def _watch(self, server: Server, http: httpx.AsyncClient, interval_s: float, timeout_s: float) -> None:
        while True:
            try:
                with anyio.fail_after(timeout_s):  # asyncio.wait_for of Python 3.11 may swallow a cancellation
                    answer = await http.get(f"{server.url}/health")
                server.set_alive(answer.status_code == 200, f"/health answers with HTTP {answer.status_code}")
            except TimeoutError:
                server.set_alive(False, f"no answer to /health within {timeout_s:g} s")
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                server.set_alive(False, str(error) or type(error).__name__)
            await asyncio.sleep(interval_s)
