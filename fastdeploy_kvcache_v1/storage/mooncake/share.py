"""The memory that this process gives to the store: once, and until the process ends.

By a client of its own. The clients that read and write are ended when a call fails, and what is stored in the memory
of a client that ends is lost for all.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time

from ...config import MIB
from ...errors import KVCacheError
from .client import MooncakeClient
from .settings import MooncakeSettings

__all__ = ["give_memory", "take_back_memory"]

logger = logging.getLogger(__name__)

PAUSE_S = 5.0
"""Before each try to give memory again."""

_lock = threading.Lock()
_given: dict[MooncakeSettings, MooncakeClient] = {}


def give_memory(settings: MooncakeSettings, rank: int) -> None:
    """Gives `settings.global_segment_size` bytes, unless they are given already. Thread-safe.

    Raises as `MooncakeClient` does; then a later call tries again. A client's process that dies is started again. When
    this process ends, however it does, the client's process leaves the store in order.
    """
    with _lock:
        if settings not in _given:
            _give(settings, rank)


def take_back_memory() -> None:
    """What is stored in it is lost."""
    with _lock:
        while _given:
            _given.popitem()[1].close()


def _give(settings: MooncakeSettings, rank: int) -> None:
    client = _given[settings] = MooncakeClient(settings, rank=rank, segment_bytes=settings.global_segment_size)
    threading.Thread(target=_watch, args=(client, settings, rank), name="kv-mooncake", daemon=True).start()


def _watch(client: MooncakeClient, settings: MooncakeSettings, rank: int) -> None:
    """Gives the memory again when the process of `client` dies, until it is taken back."""
    client.wait()
    if _given.get(settings) is client:
        logger.warning("the process that gives memory to mooncake has ended: the blocks in it are lost")
    while _given.get(settings) is client:
        time.sleep(PAUSE_S)
        with _lock, contextlib.suppress(KVCacheError, OSError):  # a master that is away is told by those who ask it
            if _given.get(settings) is client:
                _give(settings, rank)
                num_bytes = settings.global_segment_size
                logger.warning("mooncake has %d MiB of memory of this process again", num_bytes // MIB)
