"""DeviceStores: sends the blocks of requests that have ended to the store, from where they are on the device."""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...contract.messages import BlockHash, BlockHashes, CacheLevel, CopyResult
from ...scheduler.cache_manager import CacheManager
from ..engine.breaker import Breaker
from ..engine.counters import StorageCounters
from ..engine.store_link import CommandLink
from ..engine.store_side import StoreSide
from ..engine.target import Prefix
from ..messages import StoreDone
from .target import plain_prefix
from .tasks import TRANSFER_TIMEOUT_S, WriteDone, WriteStorageTask

__all__ = ["DeviceStores"]

PIECE_BLOCKS = 32
"""Of a prompt's first piece, and each further one is twice as long: the SDK takes all token ids up to a piece's end, so
pieces of one length would cost the square of the prompt.
"""

BLOCKS_IN_TIME = 128
"""A longer piece may take longer than `TRANSFER_TIMEOUT_S`."""

PIECES_UNDER_WAY = 2
MOST_WAITING = 256
"""Requests. Beyond that the oldest is given up: its blocks are the first to leave the device anyway."""

LOOKED_AT = 8
"""Requests in the line that may pass one whose next piece another request stores already."""

MOST_KNOWN = 65_536
"""Blocks of which it is remembered that they are stored. What the store evicts meanwhile is found out in time."""


@dataclass(eq=False, slots=True)
class _Waiting:
    prefix: Prefix
    piece_blocks: int = PIECE_BLOCKS
    """Of its next piece, at most."""


@dataclass(eq=False, slots=True)
class _Write:
    store_id: str
    waited: _Waiting
    first: int
    """First block that is stored."""
    slots: tuple[int, ...]
    after_step: int
    """Sent once every copy and pass up to this step has ended: then the bytes are there."""
    begun_at: float
    is_sent: bool = False

    @property
    def prefix(self) -> Prefix:
        return self.waited.prefix

    @property
    def end(self) -> int:
        return self.first + len(self.slots)

    @property
    def hashes(self) -> Sequence[BlockHash]:
        return self.prefix.hashes[self.first : self.end]


class DeviceStores(StoreSide):
    """Pieces of a prompt go one after the other, so that what is stored can be found. Nothing is pinned: a block may
    leave the device while it is read, and only its slot stays.
    """

    def __init__(
        self,
        manager: CacheManager,
        link: CommandLink,
        counters: StorageCounters,
        clock: Callable[[], float],
        *,
        last_told: Callable[[], int],
        are_slots_quiet: Callable[[int, float], bool],
        waits_for_batch: Callable[[int], bool],
        num_wanted: Callable[[], int],
    ) -> None:
        """`last_told`: the last step that the workers were told of. `are_slots_quiet`, `waits_for_batch`: see
        `DeviceTarget`. `num_wanted`: slots that a request waits for.
        """
        self._manager = manager
        self._block_size = manager.config.block_size
        self._most_blocks = max(1, manager.num_device_blocks // 8)
        """Being stored at once."""
        self._link = link
        self._counters = counters
        self._clock = clock
        self._last_told = last_told
        self._are_slots_quiet = are_slots_quiet
        self._waits_for_batch = waits_for_batch
        self._num_wanted = num_wanted
        self._breaker = Breaker(clock)
        self._waiting: deque[_Waiting] = deque()
        self._under_way: dict[str, _Write] = {}
        """Those that were told to the cache manager, in order."""
        self._known: OrderedDict[BlockHash, None] = OrderedDict()
        self._numbers = itertools.count()

    def request_ended(self, sequence: BlockHashes, token_ids: Sequence[int]) -> None:
        prefix, num_skipped = plain_prefix(sequence, token_ids, self._block_size)
        self._counters.unaddressable_blocks += num_skipped
        if self._num_known(prefix) == len(prefix.hashes):
            return
        if len(self._waiting) == MOST_WAITING:
            self._give_up(self._waiting.popleft().prefix)
        self._waiting.append(_Waiting(prefix))

    def copy_failed(self, result: CopyResult) -> None:
        """What was to be stored from one of its targets never arrived there."""
        if result.target is not CacheLevel.DEVICE:
            return
        lost = frozenset(result.target_slots)
        for write in list(self._under_way.values()):
            if not write.is_sent and not lost.isdisjoint(write.slots):
                self._end(write)
                self._give_up(write.prefix)

    def copies_doubted(self) -> None:
        for write in list(self._under_way.values()):
            if not write.is_sent:
                self._end(write)
                self._give_up(write.prefix)

    def cache_reset(self) -> None:
        """Sent later, blocks of before might be stored under the name of other weights. What has not begun finds them
        gone.
        """
        self.copies_doubted()
        self._known.clear()

    def go_on(self) -> None:
        for write in [each for each in self._under_way.values() if not each.is_sent]:
            if self._waits_for_batch(write.after_step):
                self._end(write)  # there may be no batch before a request has its slots
                self._waiting.appendleft(write.waited)
            else:
                self._send_if_quiet(write)
        if self._waits_for_batch(self._last_told()):
            return
        if self._num_wanted() > self._manager.num_device_blocks - self._most_blocks:
            return  # as long as one block after the other is stored, this request would wait
        for waiting in list(itertools.islice(self._waiting, LOOKED_AT)):
            room = self._most_blocks - sum(len(write.slots) for write in self._under_way.values())
            if len(self._under_way) >= PIECES_UNDER_WAY or room <= 0:
                break
            hashes, first = waiting.prefix.hashes, self._num_known(waiting.prefix)
            if first < len(hashes) and self._is_under_way(hashes[first]):
                continue  # another request's piece
            self._waiting.remove(waiting)
            if first < len(hashes):
                self._begin(waiting, first, min(waiting.piece_blocks, room))

    def store_done(self, answer: StoreDone) -> None:
        assert isinstance(answer, WriteDone)
        self._counters.store.add(answer, answer.num_written)
        write = self._under_way[answer.store_id]
        self._breaker.answered(answer.error)
        self._end(write)
        self._take_over(write, answer)

    @property
    def is_left_alone(self) -> bool:
        return self._breaker.is_open

    @property
    def is_idle(self) -> bool:
        return not self._under_way

    def held_since(self) -> float | None:
        return next((write.begun_at for write in self._under_way.values()), None)

    def _begin(self, waiting: _Waiting, first: int, most: int) -> None:
        """Store the next piece of a prompt, as far as it is on the device."""
        prefix = waiting.prefix
        if not self._breaker.may_pass():
            self._give_up(prefix)
            return
        store_id = f"store-{next(self._numbers)}"
        source = self._manager.begin_device_store(store_id, prefix.hashes, first, most=most)
        if not source.slots:
            self._give_up(prefix)
            return
        write = self._under_way[store_id] = _Write(
            store_id,
            waiting,
            first,
            source.slots,
            after_step=self._last_told(),
            begun_at=self._clock(),
        )
        self._send_if_quiet(write)

    def _is_under_way(self, block: BlockHash) -> bool:
        return any(block in write.hashes for write in self._under_way.values())

    def _send_if_quiet(self, write: _Write) -> None:
        if not self._are_slots_quiet(write.after_step, write.begun_at):
            return
        write.is_sent = True
        token_ids = write.prefix.token_ids  # the store is asked once how far it has them
        is_continued = write.waited.piece_blocks > PIECE_BLOCKS
        if is_continued:
            token_ids = token_ids[: write.end * self._block_size]
        self._link.send(
            WriteStorageTask(
                task_id=write.store_id,
                token_ids=token_ids,
                gpu_block_ids=write.slots,
                start_write_block_idx=write.first,
                is_continued=is_continued,
                timeout=TRANSFER_TIMEOUT_S * max(1.0, len(write.slots) / BLOCKS_IN_TIME),
                begun_at=write.begun_at,
            )
        )

    def _end(self, write: _Write) -> None:
        del self._under_way[write.store_id]
        self._manager.end_store(write.store_id)

    def _take_over(self, write: _Write, answer: WriteDone) -> None:
        if answer.error is not None:
            self._give_up(write.prefix)
            return
        if answer.num_stored == 0:  # the blocks before have left the store
            for block in write.prefix.hashes[: write.first]:
                self._known.pop(block, None)
        self._know(write.prefix.hashes[write.first : write.first + answer.num_stored])
        if answer.num_stored < len(write.slots):
            self._give_up(write.prefix)
        elif write.first + answer.num_stored < len(write.prefix.hashes):
            self._waiting.appendleft(_Waiting(write.prefix, 2 * write.waited.piece_blocks))

    def _know(self, hashes: Iterable[BlockHash]) -> None:
        for block in hashes:
            self._known[block] = None
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)

    def _num_known(self, prefix: Prefix) -> int:
        """Leading blocks that are stored, as far as is remembered."""
        number = 0
        while number < len(prefix.hashes) and prefix.hashes[number] in self._known:
            number += 1
        return number

    def _give_up(self, prefix: Prefix) -> None:
        self._counters.skipped_store_blocks += len(prefix.hashes) - self._num_known(prefix)
