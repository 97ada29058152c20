"""FirstTokens: what a decode server gets from prefill servers, held until it can be used.

FastDeploy takes a first token as the sign that the blocks are here, and waits for it without end. Here the token waits
for the blocks, and both for a limited time. All of it happens on FastDeploy's thread for such requests, which asks for
news every millisecond.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from .decode_adapter import DecodeAdapter
from .grants import ABORTED, OK, Lost, told_by_prefill

logger = logging.getLogger(__name__)

DROPPED = "decode_drop"
"""FastDeploy's word for requests that a paused prefill server has refused."""

REFUSAL_S = 5.0
"""A refusal waits so long for its request, which the router sends to both servers at once."""


class FirstTokens:
    """`engine` is FastDeploy's EngineService, `output_class` its RequestOutput."""

    def __init__(
        self,
        engine: Any,
        cache: DecodeAdapter,
        output_class: Any,
        on_end: Callable[[], None] = lambda: None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_end` is called when a request leaves without having run here."""
        self._engine = engine
        self._cache = cache
        self._output_class = output_class
        self._on_end = on_end
        self._clock = clock
        self._ready: list[Any] = []
        self._refused: dict[str, tuple[Lost, float]] = {}
        """By id: why prefill gave up a request that has not come here yet, and until when that holds."""

    def is_empty(self, queue_is_empty: Callable[[], bool]) -> bool:
        """Whether there is nothing for FastDeploy to take; acts on what has arrived and on deadlines."""
        self._cache.take_news()
        manager = self._engine.resource_manager
        with manager.lock:
            # FastDeploy waits until those that it does not have are gone from this set, which nothing else does.
            manager.waiting_abort_req_id_set.intersection_update(manager.requests)
            aborted = set(manager.waiting_abort_req_id_set)
        for lost in self._cache.lost(aborted):
            self._answer(lost)
        self._answer_refused()
        self._ready += self._take_ready()
        return not self._ready and queue_is_empty()

    def take(self, take_from_queue: Callable[[], list[Any] | None]) -> list[Any]:
        """What FastDeploy takes: everything but first tokens whose blocks are not here."""
        items = [item for item in take_from_queue() or () if not self._hold(item)]
        self._answer_refused()
        self._ready += self._take_ready()
        if self._ready:
            items.append(("decode", self._ready))
            self._ready = []
        return items

    def _hold(self, item: Any) -> bool:
        outputs = item[1]
        if item[0] == DROPPED:  # FastDeploy answers those that have come
            for request_id in outputs:
                if not self._engine.scheduler.has_request(request_id):
                    self._refuse(Lost(request_id, ABORTED, "Aborted: the prefill server is paused"))
            return False
        if not outputs or not isinstance(outputs[0], self._output_class):
            return False
        for output in outputs:
            if self._cache.take_token(output):
                continue
            logger.warning("the first token of request %s was dropped: no request waits for it", output.request_id)
            if output.error_code != OK and not self._cache.knew(output):
                self._refuse(told_by_prefill(output))
        return True

    def _refuse(self, lost: Lost) -> None:
        """Prefill gave up before there were blocks here, and the client waits, or will."""
        self._refused[lost.request_id] = lost, self._clock() + REFUSAL_S

    def _answer_refused(self) -> None:
        """Those whose requests are here."""
        engine, now = self._engine, self._clock()
        for request_id, (lost, until) in list(self._refused.items()):
            is_known = engine.scheduler.has_request(request_id)
            if not is_known and now < until:
                continue
            del self._refused[request_id]
            if is_known and request_id not in engine.resource_manager.requests:
                logger.warning("request %s ends with %d: %s", *lost)
                engine.scheduler.put_results([self._last(lost)])

    def _take_ready(self) -> list[Any]:
        """One that is complete with its first token is answered here: FastDeploy would go on behind its end."""
        ready = []
        for grant in self._cache.take_ready(self._engine.scheduler.has_request):
            output = grant.first_token
            if output.outputs.token_ids[-1] in grant.request.eos_token_ids:
                output.finished = True
                self._end(output.request_id, output)
            else:
                ready.append(output)
        return ready

    def _answer(self, lost: Lost) -> None:
        logger.warning("request %s ends with %d: %s", *lost)
        self._end(lost.request_id, self._last(lost))

    def _last(self, lost: Lost) -> Any:
        return self._output_class(
            request_id=lost.request_id, finished=True, error_code=lost.code, error_msg=lost.reason
        )

    def _end(self, request_id: str, output: Any) -> None:
        """The request leaves this server, with `output` as its last."""
        manager = self._engine.resource_manager
        manager.pre_recycle_resource(request_id)
        with manager.lock:
            manager.waiting_abort_req_id_set.discard(request_id)
        self._engine.token_processor.tokens_counter.pop(request_id, None)
        self._engine.scheduler.put_results([output])
        self._on_end()
