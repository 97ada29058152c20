"""Followers: requests that wait one batch for blocks that it computes for another one (`scheduler/open_prefills.py`).

They stay in FastDeploy's queue, where abortion, pause and reset find them. FastDeploy can pass over a request of its
queue while its images are being loaded, and puts it at the end; here it is put back where it was.
"""

from __future__ import annotations

import logging
from typing import Any

from .adapter import PrefixCacheAdapter

logger = logging.getLogger(__name__)


class Followers:
    """Of one call of `schedule`. The schedule loop's own; `manager` is FastDeploy's ResourceManagerV1.

    Who comes later may pass a follower only if it takes nothing that the follower needs in the next batch: there are a
    seat and blocks for both, and the batch computes its whole prompt. A longer one would go on before the follower.
    """

    def __init__(self, cache: PrefixCacheAdapter) -> None:
        self._cache = cache
        self._passed_over: list[Any] = []
        """In the order of the queue: followers, and those that may not pass them."""

    def passes_over(self, manager: Any, request: Any) -> bool:
        """Whether this batch leaves out the request at the head of the queue. Under FastDeploy's lock."""
        try:
            others = (each for each in manager.waiting if each is not request)
            must_wait = self._cache.waits_for_prefill(request, others)
            must_wait = must_wait or (bool(self._passed_over) and not self._may_pass(manager, request))
        except Exception:  # the edge to what clients send: the match of this request will say what is wrong
            logger.exception("request %s does not wait for a prefix that others compute", request.request_id)
            return False
        if must_wait:
            self._passed_over.append(request)
        return must_wait

    def _may_pass(self, manager: Any, request: Any) -> bool:
        if sum(manager.stop_flags) <= len(self._passed_over):
            return False
        cache, size = self._cache, manager.config.cache_config.block_size
        both = (*self._passed_over, request)
        if not cache.can_allocate_gpu_blocks(sum(-(-each.num_total_tokens // size) for each in both)):
            return False
        return cache.num_uncached_tokens(request) <= self._budget_left(manager)

    def _budget_left(self, manager: Any) -> int:
        """At least so many tokens: FastDeploy keeps the number to itself."""
        config, running = manager.config, manager.running
        num_decoding = len(running) * (1 + config.speculative_config.num_speculative_tokens)
        chunks = [each.prefill_end_index - each.prefill_start_index for each in running if self._cache.computes(each)]
        left: int = config.scheduler_config.max_num_batched_tokens - num_decoding - sum(chunks)
        return left

    def put_back(self, manager: Any) -> None:
        """`schedule` has ended, perhaps by raising: then FastDeploy has lost them."""
        if not self._passed_over:
            return
        with manager.lock:
            for request in reversed(self._passed_over):
                if request in manager.waiting:
                    manager.waiting.remove(request)
                manager.waiting.appendleft(request)
        self._passed_over.clear()
