"""WatchedBlocks: a sample of the blocks of past prompts, two per octave of depth, in groups used by the same requests.

A request that uses a whole group costs O(1), independent of its size. A group is cut where a prompt leaves it or ends.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence

from ...contract.messages import BlockHash
from ..run import Owner

DEPTHS = (1, *(mantissa << octave for octave in range(26) for mantissa in (2, 3)))
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

    __slots__ = ("begin", "depth", "end", "generation", "num_blocks", "owner", "time", "use_class", "uses")

    def __init__(self, begin: int, end: int, uses: int, time: int, generation: int, owner: Owner | None) -> None:
        self.begin = begin
        self.end = end
        self.depth = DEPTHS[end - 1]
        """Depth of its last block."""
        self.num_blocks = self.depth - ABOVE[begin]
        """Number of blocks that the watched ones stand for."""
        self.uses = uses
        """Number of later requests that found them computed, counted up to `MOST_USES`."""
        self.time = time
        """Time of the last use, or `IN_USE`."""
        self.owner = owner
        """The session that alone has used them; None: several have."""
        self.use_class = 0
        """At the end of the last request that used them."""
        self.generation = generation
        """Last generation in which they were used; it holds their hashes."""


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

    def use(
        self, hashes: Sequence[BlockHash], num_blocks: int, before: Sequence[Group] = (), owner: Owner | None = None
    ) -> list[Group]:
        """Return the known groups of the first `num_blocks` of a prompt, in prompt order. The last group is cut where
        the prompt leaves it. O(groups), plus O(log n) for a group that is cut or changes its generation.

        `before`: an earlier result for the same prompt. Groups that have not changed are not looked up again. `owner`:
        unknown blocks become a new group of it, which is `IN_USE`.
        """
        groups: list[Group] = []
        generation, end, begin = self._generation, bisect_right(DEPTHS, num_blocks), 0
        young, old = self._young, self._old
        for same in before:  # a cut group keeps its end and loses its beginning
            if same.begin != begin or same.end > end or same.generation != generation:
                break
            groups.append(same)
            begin = same.end
        num_unchanged = len(groups)
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
                last = groups[-1] = self._cut(last, hashes, end)
                begin = last.end
            for group in groups[num_unchanged:]:
                if group.generation != generation:
                    group.generation = generation
                    self._name(group, hashes)
        if owner is not None and begin < end:
            group = Group(begin, end, 0, IN_USE, generation, owner)
            self._name(group, hashes)
            groups.append(group)
        return groups

    def _group(self, block: BlockHash) -> Group | None:
        return self._young.get(block) or self._old.get(block)

    def make_room(self, most_blocks: int) -> None:
        """Forget the older generation if the younger one has more than half of `most_blocks`. After a decrease of
        `most_blocks`, more blocks are kept until the younger generation is full again.
        """
        if 2 * len(self._young) > most_blocks:
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
        upper = Group(group.begin, begin, group.uses, group.time, self._generation, group.owner)
        upper.use_class = group.use_class
        self._name(upper, hashes)
        group.begin = begin
        group.num_blocks -= upper.num_blocks
        return upper

    def _name(self, group: Group, hashes: Sequence[BlockHash]) -> None:
        young = self._young
        for depth in DEPTHS[group.begin : group.end]:
            young[hashes[depth - 1]] = group
