"""The memory that this process gives to the store: once, and until the process ends.

By a client of its own. The clients that read and write are ended when a call fails, and what is stored in the memory
of a client that ends is lost for all.
"""

from __future__ import annotations

import threading

from .client import MooncakeClient
from .settings import MooncakeSettings

__all__ = ["give_memory", "take_back_memory"]

_lock = threading.Lock()
_given: dict[MooncakeSettings, MooncakeClient] = {}


def give_memory(settings: MooncakeSettings, rank: int) -> None:
    """Gives `settings.global_segment_size` bytes, unless they are given already. Thread-safe.

    Raises as `MooncakeClient` does; then a later call tries again. When this process ends, however it does, the
    client's process leaves the store in order.
    """
    with _lock:
        if settings not in _given:
            _given[settings] = MooncakeClient(settings, rank=rank, segment_bytes=settings.global_segment_size)


def take_back_memory() -> None:
    """What is stored in it is lost."""
    with _lock:
        while _given:
            _given.popitem()[1].close()
