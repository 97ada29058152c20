"""OpenBatch: which requests are in the batch between FastDeploy's `schedule` and its workers' queue."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from ...contract.messages import BlockHash
from ...errors import InvariantError
from ...scheduler.open_prefills import OpenPrefills


class OpenBatch:
    """There is one at a time: FastDeploy schedules the next one after it has sent this one, or has lost it.

    A block can be matched only once the batch that computes it has reached the queue. Not thread-safe: the adapter's
    lock covers it.
    """

    def __init__(self, block_size: int, worth_tokens: int) -> None:
        """See `OpenPrefills`."""
        self.prefills = OpenPrefills(block_size, worth_tokens)
        self._loading: dict[str, int] = {}
        self._matched: dict[str, Any] = {}
        self._computed: dict[str, None] = {}

    def num_loading_tokens_of(self, request_id: str) -> int:
        """That come from the host for a request of the batch."""
        return self._loading.get(request_id, 0)

    def match(self, task: Any, *, num_loading_tokens: int = 0) -> None:
        """The request is pinned and has a block table, but is not part of the batch yet."""
        self._matched[task.request_id] = task
        if num_loading_tokens:
            self._loading[task.request_id] = num_loading_tokens

    def compute(self, request_id: str, hashes: Sequence[BlockHash]) -> None:
        """The batch computes tokens of this request; these blocks among them can be matched then."""
        self.prefills.compute(request_id, hashes)
        self._matched.pop(request_id, None)
        self._computed[request_id] = None

    def computes(self, request_id: str) -> bool:
        return request_id in self._computed

    def end(self, request_id: str) -> None:
        """The request is given up: what the batch computes of it never counts."""
        self.prefills.give_up(request_id)
        self._loading.pop(request_id, None)
        self._matched.pop(request_id, None)
        self._computed.pop(request_id, None)

    def matched(self) -> list[Any]:
        """Requests that were matched and are not part of the batch."""
        return list(self._matched.values())

    def close(self) -> list[str]:
        """The batch has reached the queue, or never will. Returns the requests of which it computes tokens."""
        computed = list(self._computed)
        self._begin()
        return computed

    def clear(self) -> None:
        self._begin()
        self._matched.clear()

    def _begin(self) -> None:
        self.prefills.begin()
        self._loading.clear()
        self._computed.clear()

    def check(self, scheduled: Set[str], unscheduled: Set[str]) -> None:
        """Raises `InvariantError` unless it names known requests only, and all that wait to be scheduled."""
        if not self._computed.keys() <= scheduled:
            raise InvariantError("open batch: it computes tokens of a request that is not scheduled")
        if self._matched.keys() != unscheduled:
            raise InvariantError("open batch: it knows other unscheduled requests than the adapter")
