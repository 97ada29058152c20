"""DecodeAdapter: the adapter of a decode server.

A request gets its seat and blocks when a prefill server asks for them, and runs when its blocks and its first token are
here. Between the two it is in `Grants`, under the adapter's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from ...errors import CacheStateError
from ...metadata import SwapStep
from ...transfer.rank_messages import TransferNews
from ..engine.adapter import PrefixCacheAdapter
from ..task_kind import TaskKind
from ..transport import RunningRow
from .grants import Grant, Grants, Lost
from .rank_channel import RankNews
from .transfer_name import name_of

logger = logging.getLogger(__name__)

ENDS_SEQUENCES = frozenset({TaskKind.PREEMPTED, TaskKind.ABORT})


class DecodeAdapter(PrefixCacheAdapter):
    """Nothing of its requests is cached, and a preempted one ends: FastDeploy sends it to a prefill server again."""

    numbers_batches = True
    grants: Grants

    # ---- FastDeploy's side

    def granted(self, request: Any) -> Grant | None:
        """See `Grants.of`."""
        with self._lock:
            return self.grants.of(request)

    def may_grant(self, request: Any) -> bool:
        """Whether it comes from a prefill server with this package, and nothing of an earlier grant is left."""
        name = name_of(request)
        if name is None:
            logger.error(
                "request %s has no transfer name: the prefill server runs without this package", request.request_id
            )
            return False
        with self._lock:
            return not self.grants.is_ending(name)

    def grant(self, request: Any) -> None:
        """FastDeploy has given `request`, which has a name, a seat and blocks for its prompt."""
        name = name_of(request)
        assert name is not None
        count = -(-request.need_prefill_tokens // self._block_size)
        with self._lock:
            self.grants.grant(request, name, [int(slot) for slot in request.block_tables[:count]])

    def recycle_gpu_blocks(self, gpu_block_ids: Sequence[int] | int, req_id: str | None = None) -> None:
        """Blocks to which a rank may still write come back to the pool when it has said that it is over."""
        ids = [gpu_block_ids] if isinstance(gpu_block_ids, int) else list(gpu_block_ids)
        with self._lock:
            if req_id is None or not self.grants.recycle(ids, req_id):
                super().recycle_gpu_blocks(ids, req_id)

    def give_back(self, slots: Sequence[int], request_id: str) -> None:
        """Parked blocks of a request come back to the pool."""
        super().recycle_gpu_blocks(slots, request_id)

    def schedule_begins(self) -> None:
        """What FastDeploy frees from now on, the batch that it puts together has to tell the workers."""
        with self._lock:
            self.grants.schedule_begins()

    def send_swaps(self, tasks: Sequence[Any], running: Sequence[RunningRow] | None = None) -> None:
        """The last thing."""
        with self._lock:
            super().send_swaps(tasks, running)
            if not tasks:
                self.grants.scheduled(None, has_freed=False)

    def _batch_scheduled(self, tasks: Sequence[Any], step: SwapStep) -> None:
        has_freed = any(task.task_type.value in ENDS_SEQUENCES for task in tasks)
        self.grants.scheduled(step.step, has_freed=has_freed)

    # ---- the workers' side

    def take_news(self) -> None:
        """What the ranks have said."""
        with self._lock:
            for rank, news in self._rank_news():
                assert isinstance(news, TransferNews), f"a decode rank tells of leases: {news}"
                for result in news.fetches:
                    try:
                        self.grants.reported(rank, result)
                    except CacheStateError as error:
                        logger.error("%s", error)

    def _rank_news(self) -> Sequence[RankNews]:
        return ()

    def lost(self, aborted: set[str]) -> list[Lost]:
        """See `Grants.lost`."""
        with self._lock:
            return self.grants.lost(aborted)

    def take_token(self, output: Any) -> bool:
        """See `Grants.take_token`."""
        with self._lock:
            return self.grants.take_token(output)

    def take_ready(self, is_known: Callable[[str], bool]) -> list[Grant]:
        """See `Grants.take_ready`."""
        with self._lock:
            return self.grants.take_ready(is_known)

    def check(self) -> None:
        """Raises `InvariantError`."""
        super().check()
        with self._lock:
            self.grants.check()
