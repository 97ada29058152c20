"""Eviction: keeps a directory to its capacity, by deleting the values that were not used for longest, shard by shard.

Keys are digests, so each shard has the same share of old values. The ages in a few shards give a cut-off age for all:
a pass over all shards deletes what is older. A put goes on with the pass until it has room, and no further, so no put
lists a large directory. Processes that evict at once have nearly the same cut-off, and delete the same values.
"""

from __future__ import annotations

import errno
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

from ...errors import StorageError
from .shard_sizes import ShardSizes
from .value_files import StoredFile, delete_files, list_shard, shards

__all__ = ["NO_ROOM", "Eviction"]

logger = logging.getLogger(__name__)

KEPT_SHARE = 0.9
"""Of the capacity, what a pass leaves: it makes room for many values."""

FREE_SHARE, MOST_FREE_BYTES = 0.01, 1 << 30
"""Of the file system, what stays free, at most so much: a full disk harms others more than a value is worth."""

NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
"""Errors of a full disk."""

SAMPLED_SHARDS = 4
LISTED = 4096
"""Values that are listed at least for a cut-off, and in each step: a directory that has fewer is evicted exactly."""

COUNTED = 16 * LISTED
"""Values that a put lists at most, and those of a shard, to count them."""


class Eviction:
    """Not thread-safe. Every method may raise `OSError`."""

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self._directory = directory
        self._capacity_bytes = capacity_bytes
        self._has_said_full = False
        """That the disk, and not the capacity, decides what is kept."""
        self._shards: list[str] = []
        """Of this pass, still to be visited."""
        self._cutoff: StoredFile | None = None
        """The last one that is old enough to be deleted; None: nothing is."""

    def make_room(self, sizes: ShardSizes, num_bytes: int) -> None:
        """For `num_bytes` more. Raises `StorageError` if they exceed the capacity."""
        self._count(sizes)
        total = sizes.read()
        limit = min(self._capacity_bytes, total + _free_bytes(self._directory))
        if total + num_bytes <= limit:
            return
        if num_bytes > self._capacity_bytes:
            raise StorageError(
                f"{num_bytes} bytes at once do not fit {self._directory}, whose capacity is {self._capacity_bytes}"
            )
        if num_bytes > limit:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._evict(sizes, num_bytes, limit)

    def write_to_full_disk(self, sizes: ShardSizes, write: Callable[[], None], *, left: int, whole: int) -> None:
        """The disk, or a quota on it, had no room for the last `left` of the `whole` bytes of a put. So the capacity is
        what is stored now. Raises `OSError` if the put itself would have to make room.
        """
        try:  # the ranks of a server fill a disk at the same time, and what the first one deletes is room for all
            return write()
        except OSError as error:
            limit = min(self._capacity_bytes, sizes.read())
            if error.errno not in NO_ROOM or int(limit * KEPT_SHARE) < whole:
                raise
        self._evict(sizes, left, limit)
        write()

    def _count(self, sizes: ShardSizes) -> None:
        """After a loss of the numbers: some shards in each put, since a large directory takes seconds."""
        listed = 0
        for shard in sizes.unknown():
            if listed < COUNTED:
                listed += len(list_shard(self._directory, shard, sizes))

    def _evict(self, sizes: ShardSizes, num_bytes: int, limit: int) -> None:
        """Delete values until there is room for `num_bytes` within `limit`, or nothing is old enough."""
        if limit < self._capacity_bytes - num_bytes and not self._has_said_full:
            self._has_said_full = True
            text = "the disk of %s is full: evicting the oldest values, capacity %d MiB instead of %d"
            logger.warning(text, self._directory, limit >> 20, self._capacity_bytes >> 20)
        for _ in range(2):  # what is left of a pass, and a new one
            if not self._shards:
                self._begin(sizes, max(0, int(limit * KEPT_SHARE) - num_bytes))
            listed = 0
            while self._shards and (listed < LISTED or sizes.read() + num_bytes > limit):
                listed += self._visit(self._shards.pop(), sizes)
            if sizes.read() + num_bytes <= limit:
                return

    def _begin(self, sizes: ShardSizes, kept: int) -> None:
        """A pass that leaves `kept` bytes."""
        self._shards = shards(self._directory, sizes)
        random.shuffle(self._shards)
        known, total = sizes.known(), sizes.read()
        sample: list[StoredFile] = []
        num_sampled = counted = left = 0
        while num_sampled < len(self._shards) and (num_sampled < SAMPLED_SHARDS or len(sample) < LISTED):
            shard = self._shards[num_sampled]
            files = list_shard(self._directory, shard, sizes)
            num_bytes = sum(file.num_bytes for file in files)
            num_sampled, counted, left = num_sampled + 1, counted + known.get(shard, num_bytes), left + num_bytes
            sample += files
        wanted = kept if num_sampled == len(self._shards) else kept * counted // max(1, total)
        self._cutoff = None
        for file in sorted(sample):
            if left <= wanted:
                break
            left -= file.num_bytes
            self._cutoff = file

    def _visit(self, shard: str, sizes: ShardSizes) -> int:
        """Returns how many values it listed."""
        files = list_shard(self._directory, shard, sizes)
        if self._cutoff is not None:
            delete_files(sorted(file for file in files if file <= self._cutoff), sizes)
        return len(files)


def _free_bytes(directory: Path) -> int:
    """Of its file system, beyond what stays free."""
    status = os.statvfs(directory)
    reserve = min(MOST_FREE_BYTES, int(status.f_blocks * status.f_frsize * FREE_SHARE))
    return status.f_bavail * status.f_frsize - reserve
