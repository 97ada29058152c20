"""WatchedBlocks: some blocks of past prompts, four in each octave of depth, in groups that the same requests have used.

A group is to watched blocks what a run is to cached ones: a request that uses all of it costs the same however many
blocks it has. It is cut where a prompt leaves it, or ends.
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
"""In blocks from the start of the prompt, ascending. The same for every prompt, so prompts with a common prefix have
common watched blocks; each stands for the blocks between the one before and itself."""

ABOVE = (0, *DEPTHS)
"""Blocks of a prompt above those that its watched blocks, from each on, stand for."""

IN_USE = -1
"""In place of a time: a running request uses the blocks, so no eviction can take them."""


def last_watched(depth: int) -> int:
    """The deepest watched block up to `depth`; 0 if there is none."""
    return ABOVE[bisect_right(DEPTHS, depth)]


class Group:
    """Watched blocks that follow each other in a prompt: those at `DEPTHS[begin:end]`."""

    __slots__ = ("begin", "depth", "end", "generation", "time", "uses")

    def __init__(self, begin: int, end: int, uses: int, time: int, generation: int) -> None:
        self.begin = begin
        self.end = end
        self.depth = DEPTHS[end - 1]
        """Blocks from the start of the prompt to the last one."""
        self.uses = uses
        """Later requests that found them computed before, as far as they are counted."""
        self.time = time
        """Of the last use, or `IN_USE`."""
        self.generation = generation
        """The last one in which they were used: it holds their names."""

    @property
    def num_blocks(self) -> int:
        """Blocks that the watched ones stand for."""
        return self.depth - ABOVE[self.begin]


class WatchedBlocks:
    """Groups by the names of their blocks. Names are chained: a prompt that shares a block shares all before it.

    There are two generations. What is used moves to the younger one, and the older one is forgotten as a whole: so the
    start of a prompt is never forgotten before its rest.
    """

    def __init__(self) -> None:
        self._generation = 0
        self._young: dict[BlockHash, Group] = {}
        self._old: dict[BlockHash, Group] = {}
        """Of what has moved to the younger generation since, the names are still here, too."""

    def __len__(self) -> int:
        """Names that are kept; after `make_room` at most as many as it allows, but for those of one prompt."""
        return len(self._young) + len(self._old)

    def use(self, hashes: Sequence[BlockHash], num_blocks: int, before: Sequence[Group] = ()) -> list[Group]:
        """The groups of the first `num_blocks` of a prompt, in its order, as far as they are known. The last one is cut
        where the prompt leaves it. O(groups), and O(log n) for one that is cut or moves to the younger generation.

        `before`: what it returned for the same prompt before, or nothing. What is still so is not looked up again.
        """
        groups: list[Group] = []
        generation, end, begin = self._generation, bisect_right(DEPTHS, num_blocks), 0
        for same in before:  # a cut leaves a group its end, and takes its beginning
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
        """As `use`, with a new group that is `IN_USE` for blocks that are not known."""
        groups, end = self.use(hashes, num_blocks, before), bisect_right(DEPTHS, num_blocks)
        known = groups[-1].end if groups else 0
        if known < end:
            group = Group(known, end, 0, IN_USE, self._generation)
            self._name(group, hashes)
            groups.append(group)
        return groups

    def make_room(self, most_blocks: int) -> None:
        """Forget the older generation if the younger one has half of what there may be. Where that was more before,
        there are more until the younger one is full again.
        """
        if len(self._young) > most_blocks // 2:
            self._generation += 1
            self._young, self._old = {}, self._young

    def forget(self) -> None:
        self._generation += 1
        self._young, self._old = {}, {}

    def _cut(self, group: Group, hashes: Sequence[BlockHash], end: int) -> Group:
        """A new group for its upper part, as far as it has the first `end` watched blocks of the prompt. O(log n)."""

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
