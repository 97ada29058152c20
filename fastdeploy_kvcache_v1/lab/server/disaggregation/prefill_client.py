"""The decode server's client for prefill servers, on a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable

import httpx2
import msgspec

from ....transfer.settings import TransferSettings
from ..prefill_job import PATH, PROOF_HEADER, PrefillAnswer, PrefillJob, PrefillLine, proof

__all__ = ["PrefillClient"]

logger = logging.getLogger(__name__)

OnAnswer = Callable[[str, "PrefillAnswer | str"], None]


class PrefillClient:
    """Each `ask` gets one answer or one error (a line of text), unless it is dropped. Thread-safe.

    A prefill server without a heartbeat for `silence_s` has failed. With heartbeats the decode server's limit holds.
    """

    def __init__(self, settings: TransferSettings) -> None:
        self._secret = settings.secret
        self._timeout = httpx2.Timeout(settings.silence_s, connect=settings.handshake_s, pool=None)
        self._on_answer: OnAnswer = lambda request_id, answer: None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._loop = asyncio.new_event_loop()
        self._http: httpx2.AsyncClient | None = None
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="prefill-client", daemon=True)

    def start(self, on_answer: OnAnswer) -> None:
        """Call `on_answer(request_id, answer or error)` from now on, on the client's thread."""
        self._on_answer = on_answer
        self._thread.start()

    def ask(self, url: str, job: PrefillJob) -> None:
        """Ask the server at `url`. Never blocks."""
        self._post(self._begin, url, job)

    def drop(self, request_id: str) -> None:
        """Cancel a request by closing its connection. Idempotent."""
        self._post(self._cancel, request_id)

    def close(self) -> None:
        """Drop all requests. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._loop.call_soon_threadsafe(self._loop.stop)
            if self._thread.ident is not None:
                self._thread.join()
            else:
                self._loop.close()

    def _post(self, call: Callable[..., None], *arguments: object) -> None:
        if not self._is_closed:
            self._loop.call_soon_threadsafe(call, *arguments)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        # A server may close an idle connection when it is reused, which would look like a failure.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self._http = httpx2.AsyncClient(timeout=self._timeout, limits=limits, trust_env=False)
        self._loop.run_forever()
        for task in self._tasks.values():
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks.values(), return_exceptions=True))
        self._loop.run_until_complete(self._http.aclose())
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())  # of answers that were not read to the end
        self._loop.close()

    def _begin(self, url: str, job: PrefillJob) -> None:
        task = self._loop.create_task(self._ask(url, job))
        self._tasks[job.request_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(job.request_id, None))

    def _cancel(self, request_id: str) -> None:
        if request_id in self._tasks:
            self._tasks[request_id].cancel()

    async def _ask(self, url: str, job: PrefillJob) -> None:
        try:
            answer: PrefillAnswer | str = await self._exchange(url, job)
        except httpx2.TimeoutException:
            answer = f"{url} gave no sign for too long"
        except (httpx2.HTTPError, httpx2.InvalidURL, msgspec.MsgspecError) as error:
            answer = f"{url} cannot be asked: {error or type(error).__name__}"
        except Exception as error:  # the edge of a task: the request is computed here instead
            logger.exception("asking a prefill server failed")
            answer = f"{url} cannot be asked: {error!r}"
        self._on_answer(job.request_id, answer)

    async def _exchange(self, url: str, job: PrefillJob) -> PrefillAnswer | str:
        assert self._http is not None, "the thread made it"
        body = msgspec.json.encode(job)
        headers = {"content-type": "application/json", PROOF_HEADER: proof(self._secret, "job", body)}
        async with self._http.stream("POST", url.rstrip("/") + PATH, content=body, headers=headers) as response:
            if response.status_code != 200:
                said = (await response.aread()).decode(errors="replace")
                return f"{url} answers with HTTP {response.status_code}: {' '.join(said.split())[:500]}"
            async for text in response.aiter_lines():
                line = msgspec.json.decode(text, type=PrefillLine)
                if line.answer is not None or line.error is not None:
                    return line.answer or f"{url}: {line.error}"
        return f"{url} ended its answer too early"
