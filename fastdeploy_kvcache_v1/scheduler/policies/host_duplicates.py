"""HostDuplicates: host copies of blocks that are on the device too, which leave a small host tier first."""

from __future__ import annotations

from typing import Any

from ..block_pool import BlockPool
from ..run import HostCopy, RunQueue

SHORT_HOST = 2
"""Host tiers above this multiple of the device tier keep their duplicates: they are a small part of it, and dropping
them costs many copies for each one saved.
"""


class HostDuplicates(RunQueue):
    """Host copies that leave before all others, the youngest first.

    The host copy of a run that returned to the device, or was used there, is a *duplicate*: the run will stay there for
    a while. A copy made because its run is about to leave the device is not. A duplicate may be dropped although
    requests use its run. Its blocks are copied again when the run leaves the device, so `are_saved` must say that the
    write policy does that.
    """

    def __init__(self, device_pool: BlockPool[Any], host_pool: BlockPool[Any], *, are_saved: bool) -> None:
        super().__init__()
        self._device_pool, self._host_pool = device_pool, host_pool
        self.may_be = are_saved
        """False: no host copy is ever a duplicate."""

    @property
    def are_wanted(self) -> bool:
        """True if the slots that duplicates take are worth more than the copies that keeping them saves."""
        return self.may_be and self._host_pool.size <= SHORT_HOST * self._device_pool.size

    def take(self, host: HostCopy) -> bool:
        """Decide about the copy of a run that was used or came to the device. True: it is a duplicate, in this queue.
        False: it is not; if it was one before, it is in no queue now.
        """
        if host.run.on_device and self.are_wanted:
            host.is_duplicate = True
            self.touch(host)
            return True
        if host.is_duplicate:
            self.drop(host)
        return False

    def drop(self, host: HostCopy) -> None:
        """Unmark a duplicate host copy and unqueue it."""
        host.is_duplicate = False
        host.leave_queue()
