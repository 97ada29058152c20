"""DeviceTarget: loads fill device blocks, and a prefix is named by its token ids."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...contract.messages import BlockHash, BlockHashes, CacheLevel
from ...scheduler.cache_manager import CacheManager
from ..engine.counters import StorageCounters
from ..engine.store_link import CommandLink
from ..engine.target import Prefix, Target
from ..messages import LoadDone, QueryDone
from .tasks import MATCH_TIMEOUT_S, TRANSFER_TIMEOUT_S, MatchTask, ReadStorageTask

__all__ = ["DeviceTarget", "plain_prefix"]

LATE_S = 5.0
"""An answer may come so long after the time that the SDK was given for it, see `QUIET_MARGIN_S` of the agent."""


class DeviceTarget(Target):
    """See `Target`. What hangs below a block that is on the host only cannot be loaded: see `CacheManager`."""

    level = CacheLevel.DEVICE

    def __init__(
        self,
        manager: CacheManager,
        link: CommandLink,
        counters: StorageCounters,
        clock: Callable[[], float],
        are_slots_quiet: Callable[[int, float], bool],
        spare: Callable[[], int],
        waits_for_batch: Callable[[int], bool],
    ) -> None:
        """`are_slots_quiet`: every copy and pass that may use slots which were free after a step, at a time, has ended.
        `spare`: slots that requests can do without now. `waits_for_batch`: see `Target`.
        """
        self.num_blocks = manager.num_device_blocks
        self._manager = manager
        self._block_size = manager.config.block_size
        self._link = link
        self._counters = counters
        self._are_slots_quiet = are_slots_quiet
        self._spare = spare
        self._waits_for_batch = waits_for_batch
        self._clock = clock
        self._due: dict[str, float] = {}
        """When a question or a load that has no answer should have had one."""

    @property
    def is_serving(self) -> bool:
        """False: the SDK has not kept to the time that it was given."""
        left = self.seconds_left()
        return left is None or left > 0

    def seconds_left(self) -> float | None:
        """Until `is_serving` ends if nothing is answered; None for never."""
        return min(self._due.values()) - self._clock() if self._due else None

    def answered(self, answer: object) -> None:
        if isinstance(answer, QueryDone):
            self._due.pop(answer.query_id, None)
        elif isinstance(answer, LoadDone):
            self._due.pop(answer.load_id, None)

    def prefix(self, sequence: BlockHashes, token_ids: Sequence[int]) -> Prefix:
        prefix, num_skipped = plain_prefix(sequence, token_ids, self._block_size)
        self._counters.unaddressable_blocks += num_skipped
        return prefix

    def count_present(self, hashes: Sequence[BlockHash]) -> int:
        return self._manager.count_on_device(hashes)

    def room(self) -> int:
        return self._spare()

    def may_fill(self, step: int, since: float) -> bool:
        return self._are_slots_quiet(step, since)

    def waits_for_batch(self, step: int) -> bool:
        return self._waits_for_batch(step)

    def query(self, query_id: str, prefix: Prefix, begin: int) -> None:
        self._due[query_id] = self._clock() + MATCH_TIMEOUT_S + LATE_S
        self._link.send(MatchTask(task_id=query_id, token_ids=prefix.token_ids, first_block_idx=begin))

    def load(self, load_id: str, prefix: Prefix, begin: int, slots: Sequence[int], since: float) -> None:
        self._due[load_id] = self._clock() + TRANSFER_TIMEOUT_S + LATE_S
        token_ids = prefix.token_ids[: (begin + len(slots)) * self._block_size]
        self._link.send(
            ReadStorageTask(
                task_id=load_id,
                token_ids=token_ids,
                gpu_block_ids=tuple(slots),
                start_read_block_idx=begin,
                begun_at=since,
            )
        )


def plain_prefix(sequence: BlockHashes, token_ids: Sequence[int], block_size: int) -> tuple[Prefix, int]:
    """All whole blocks before the last token that their token ids name, and how many are left out.

    Images, adapters or a tenant decide the bytes of the others as well: under their token ids alone they would be taken
    for something else.
    """
    most = max(0, sequence.num_tokens - 1) // block_size
    num_plain = min(most, sequence.num_plain_blocks)
    assert len(token_ids) >= num_plain * block_size, "the caller gives the token ids of the sequence"
    return Prefix(tuple(sequence.hashes[:num_plain]), tuple(token_ids[: num_plain * block_size])), most - num_plain
