"""HeldBack: requests that wait because another live request has their id.

Ids come from clients. FastDeploy finds, compares and ends requests by id. With two requests of one id it frees the
blocks of one when the other is complete, while the worker still writes to them. So the second waits for the first.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)


class HeldBack:
    """Thread-safe. `manager` is FastDeploy's ResourceManagerV1; `waits_elsewhere` tells of an id whether a request of
    ours has it that FastDeploy does not know yet.
    """

    def __init__(self, waits_elsewhere: Callable[[str], bool] = lambda request_id: False) -> None:
        self._waits_elsewhere = waits_elsewhere
        self._requests: deque[Any] = deque()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._requests)

    def hold(self, manager: Any, request: Any) -> bool:
        """Whether `request` must wait; then it is held. An id that comes anew is of no abortion on its way any more."""
        with self._lock:
            is_taken = self._is_taken(manager, request.request_id)
            if is_taken:
                logger.warning("request %s waits: a live request has the same id", request.request_id)
                self._requests.append(request)
            else:
                _forget_abortion(manager, request.request_id)
            return is_taken

    def release(self, manager: Any) -> list[Any]:
        """The held requests whose ids are free now, in order of arrival; of two with one id only the first."""
        free: dict[str, Any] = {}
        with self._lock:
            for request in self._requests:
                if request.request_id not in free and not self._is_taken(manager, request.request_id):
                    free[request.request_id] = request
            self._requests = deque(each for each in self._requests if free.get(each.request_id) is not each)
        return list(free.values())

    def clear(self) -> None:
        with self._lock:
            self._requests.clear()

    def _is_taken(self, manager: Any, request_id: str) -> bool:
        return self._waits_elsewhere(request_id) or _is_live(manager, request_id)


def _is_live(manager: Any, request_id: str) -> bool:
    """FastDeploy's own table of requests does not tell: it keeps some that ended with an error."""
    with manager.lock:
        if request_id not in manager.requests:
            return False
        unconfirmed = manager.to_be_rescheduled_request_id_set, manager.to_be_aborted_req_id_set
        return any(request_id in ids for ids in unconfirmed) or any(
            each.request_id == request_id for queue in (manager.running, manager.waiting) for each in queue
        )


def _forget_abortion(manager: Any, request_id: str) -> None:
    """2.5 keeps the id of a request that ended while its abortion was on its way, and takes the next one for it."""
    with manager.lock:
        manager.to_be_aborted_req_id_set.discard(request_id)
