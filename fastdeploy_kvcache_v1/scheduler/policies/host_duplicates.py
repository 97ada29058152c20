"""HostDuplicates: what is on the device as well leaves the host first, where the host tier is short."""

from __future__ import annotations

from typing import Any

from ..block_pool import BlockPool
from ..run import HostCopy, RunQueue

SHORT_HOST = 2
"""Times as large as the device tier: of a larger host tier what it holds twice is a small part, and each copy that it
saves by giving that up is paid with many.
"""


class HostDuplicates(RunQueue):
    """Host copies that leave before all others, the youngest first. A run that came back to the device, or was used
    there, will stay there for a while: its host copy is a *duplicate*. A copy made because its run is about to leave
    the device is not.

    Nothing is lost with a duplicate, and it may go although requests use its run; but it is copied again when the run
    leaves the device.
    """

    def __init__(self, device_pool: BlockPool[Any], host_pool: BlockPool[Any], *, are_saved: bool) -> None:
        """`are_saved`: what leaves the device without a host copy is copied then. Else no duplicate may go."""
        super().__init__()
        self._device_pool, self._host_pool = device_pool, host_pool
        self.may_be = are_saved
        """Else there is never any."""

    @property
    def are_wanted(self) -> bool:
        """Is what the host may hold twice worth more than the copies?"""
        return self.may_be and self._host_pool.size <= SHORT_HOST * self._device_pool.size

    def take(self, host: HostCopy) -> bool:
        """Is the copy of a run that was used, or came to the device, a duplicate now? Then it is in this queue, else in
        its own or, if it was a duplicate, in none.
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
