"""The memory that this process gives to the store: once, and until the process ends.

By a client of its own. The clients that read and write are ended when a call fails, and what is stored in the memory
of a client that ends is lost for all.
"""

from __future__ import annotations

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


class _Share:
    client: MooncakeClient | None = None
    """None: not yet, or not at the moment."""


_given: dict[MooncakeSettings, _Share] = {}


def give_memory(settings: MooncakeSettings, num_bytes: int) -> None:
    """Give memory on a thread, unless it is given already. Thread-safe, and returns at once.

    A master that is away is tried again, and a client's process that dies is started again. When this process ends,
    however it does, the client's process leaves the store in order.
    """
    with _lock:
        if settings in _given:
            return
        share = _given[settings] = _Share()
    threading.Thread(target=_give, args=(share, settings, num_bytes), name="kv-mooncake", daemon=True).start()


def take_back_memory() -> None:
    """What is stored in it is lost."""
    with _lock:
        clients = [share.client for share in _given.values()]
        _given.clear()
    for client in clients:
        if client is not None:
            client.close()


def _give(share: _Share, settings: MooncakeSettings, num_bytes: int) -> None:
    """Until it is taken back."""
    was_lost = False
    while _given.get(settings) is share:
        try:
            client = MooncakeClient(settings, segment_bytes=num_bytes)
        except (KVCacheError, OSError):  # a master that is away is told by those who ask it
            time.sleep(PAUSE_S)
            continue
        with _lock:
            is_wanted = _given.get(settings) is share
            share.client = client
        if not is_wanted:
            client.close()
            return
        if was_lost:
            logger.warning("mooncake has %d MiB of memory of this process again", num_bytes // MIB)
        client.wait()
        share.client = None
        was_lost = _given.get(settings) is share
        if was_lost:
            logger.warning("the process that gives memory to mooncake has ended: the blocks in it are lost")
            time.sleep(PAUSE_S)
