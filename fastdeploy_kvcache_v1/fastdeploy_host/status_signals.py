"""Answers to the host's shared-memory signals that its transfer process and its own cache manager would give."""

from __future__ import annotations

import logging
import threading
from typing import Any

logger = logging.getLogger(__name__)

NORMAL, UPDATING, CLEARING, CLEARED = 0, 1, -1, -2
"""Values of the host's PrefixTreeStatus and KVCacheStatus."""

POLL_S = 0.01
ANSWERS = {CLEARING: CLEARED, UPDATING: NORMAL}


class StatusAnswers:
    """A thread that completes weight updates of the legacy API: it empties the cache and says so.

    `tree_status` and `cache_status` are the host's signals (one-element arrays in `.value`). The worker frees its own
    caches; this only keeps whoever waits for the transfer process from waiting in vain.
    """

    def __init__(self, cache: Any, tree_status: Any, cache_status: Any | None) -> None:
        self._cache = cache
        self._tree_status = tree_status
        self._cache_status = cache_status
        self._stopped = threading.Event()

    def start(self) -> None:
        threading.Thread(target=self._run, name="kvcache-v1-status", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def poll(self) -> None:
        """Answer what is asked now."""
        asked = int(self._tree_status.value[0])
        if asked == CLEARING:
            self._cache.reset()
        elif asked == UPDATING:  # workers dropped what was queued; new requests may be running by now
            self._cache.batch_dropped()
        if asked in ANSWERS:
            self._tree_status.value[0] = ANSWERS[asked]
        if self._cache_status is not None and (answer := ANSWERS.get(int(self._cache_status.value[0]))) is not None:
            self._cache_status.value[0] = answer

    def _run(self) -> None:
        while not self._stopped.wait(POLL_S):
            try:
                self.poll()
            except Exception:  # the edge of a thread: whoever waits times out, the next update may work
                logger.exception("a weight update could not be answered")
