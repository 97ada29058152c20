"""WatchedBlocks: a sample of the blocks of past prompts, four per octave of depth, in groups used by the same requests.

A request that uses a whole group costs O(1), independent of its size. A group is cut where a prompt leaves it or ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ...contract.messages import BlockHash

PER_OCTAVE = 4
DEEPEST = 1 << 26


def _depths() -> tuple[int, ...]:
    depths, step = list(range(1, PER_OCTAVE)), 1
    while depths[-1] < DEEPEST:
        depths += [step * mantissa for mantissa in range(PER_OCTAVE, 2 * PER_OCTAVE)]
        step *= 2
    return tuple(depths)


DEPTHS = _depths()
"""Depths of watched blocks, in blocks from the start of the prompt, ascending. They are the same for every prompt, so
prompts with a common prefix share watched blocks. Each one also stands for the blocks behind the one before it."""

ABOVE = (0, *DEPTHS)
"""Depth of the watched block before each one."""

IN_USE = -1
"""Replaces a time while a running request uses the blocks, so that they cannot be evicted."""


def last_watched(depth: int) -> int:
    """Return the depth of the deepest watched block up to `depth`, or 0."""
    return ABOVE[bisect_right(DEPTHS, depth)]


class Group:
    """Consecutive watched blocks of a prompt: those at `DEPTHS[begin:end]`."""

    __slots__ = ("begin", "depth", "end", "generation", "time", "uses")

    def __init__(self, begin: int, end: int, uses: int, time: int, generation: int) -> None:
        self.begin = begin
        self.end = end
        self.depth = DEPTHS[end - 1]
        """Depth of its last block."""
        self.uses = uses
        """Number of later requests that found them computed, counted up to `MOST_USES`."""
        self.time = time
        """Time of the last use, or `IN_USE`."""
        self.generation = generation
        """Last generation in which they were used; it holds their hashes."""

    @property
    def num_blocks(self) -> int:
        """Number of blocks that the watched ones stand for."""
        return self.depth - ABOVE[self.begin]


class WatchedBlocks:
    """Groups by the hashes of their blocks. Hashes are chained: prompts that share a block share all blocks before it.

    There are two generations. Groups that are used move to the younger one; the older one is forgotten as a whole. So
    the start of a prompt is never forgotten before its rest.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._young: dict[BlockHash, Group] = {}
        self._old: dict[BlockHash, Group] = {}
        """Keeps the hashes of groups that have moved to the younger generation."""

    def __len__(self) -> int:
        """Number of kept hashes. `make_room` bounds it, except for the hashes of one prompt."""
        return len(self._young) + len(self._old)

    def use(self, hashes: Sequence[BlockHash], num_blocks: int, before: Sequence[Group] = ()) -> list[Group]:
        """Return the known groups of the first `num_blocks` of a prompt, in prompt order. The last group is cut where
        the prompt leaves it. O(groups), plus O(log n) for a group that is cut or changes its generation.

        `before`: an earlier result for the same prompt. Groups that have not changed are not looked up again.
        """
        groups: list[Group] = []
        generation, end, begin = self._generation, bisect_right(DEPTHS, num_blocks), 0
        for same in before:  # a cut group keeps its end and loses its beginning
            if same.begin != begin or same.end > end or same.generation != generation:
                break
            groups.append(same)
            begin = same.end
        if begin == end:
            return groups
        young, old, num_unchanged = self._young, self._old, len(groups)
        while begin < end:
            block = hashes[DEPTHS[begin] - 1]
            group = young.get(block) or old.get(block)
            if group is None:
                break
            assert group.begin == begin, "a prompt that shares a block shares all before it"
            groups.append(group)
            begin = group.end
        if len(groups) > num_unchanged:
            last = groups[-1]
            if last.end > end or self._group(hashes[last.depth - 1]) is not last:  # the prompt leaves it
                groups[-1] = self._cut(last, hashes, end)
        for group in groups[num_unchanged:]:
            if group.generation != generation:
                group.generation = generation
                self._name(group, hashes)
        return groups

    def _group(self, block: BlockHash) -> Group | None:
        return self._young.get(block) or self._old.get(block)

    def use_all(self, hashes: Sequence[BlockHash], num_blocks: int, before: Sequence[Group] = ()) -> list[Group]:
        """As `use`, but with a new group, which is `IN_USE`, for unknown blocks."""
        groups, end = self.use(hashes, num_blocks, before), bisect_right(DEPTHS, num_blocks)
        known = groups[-1].end if groups else 0
        if known < end:
            group = Group(known, end, 0, IN_USE, self._generation)
            self._name(group, hashes)
            groups.append(group)
        return groups

    def make_room(self, most_blocks: int) -> None:
        """Forget the older generation if the younger one has more than half of `most_blocks`. After a decrease of
        `most_blocks`, more blocks are kept until the younger generation is full again.
        """
        if len(self._young) > most_blocks // 2:
            self._generation += 1
            self._young, self._old = {}, self._young

    def forget(self) -> None:
        self._generation += 1
        self._young, self._old = {}, {}

    def _cut(self, group: Group, hashes: Sequence[BlockHash], end: int) -> Group:
        """Cut off and return the upper part of `group` that the prompt shares, up to depth index `end`. O(log n)."""

        def is_left(index: int) -> bool:
            return self._group(hashes[DEPTHS[index] - 1]) is not group

        begin = group.begin + 1  # the first one is the prompt's
        begin += bisect_left(range(begin, min(group.end, end)), True, key=is_left)
        upper = Group(group.begin, begin, group.uses, group.time, self._generation)
        self._name(upper, hashes)
        group.begin = begin
        return upper

    def _name(self, group: Group, hashes: Sequence[BlockHash]) -> None:
        young = self._young
        for depth in DEPTHS[group.begin : group.end]:
            young[hashes[depth - 1]] = group
