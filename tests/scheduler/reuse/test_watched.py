"""WatchedBlocks against one entry per block, under prompts of a tree that overlap and are forgotten."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.metadata import BlockHash
from fastdeploy_kvcache_v1.scheduler.reuse.depths import DEPTHS
from fastdeploy_kvcache_v1.scheduler.reuse.watched import IN_USE, Group, WatchedBlocks


class OneByOne:
    """The number of uses of each watched block, in two generations."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self.young: dict[BlockHash, int] = {}
        self.old: dict[BlockHash, int] = {}

    def uses(self, names: list[BlockHash]) -> list[int]:
        """Of the known ones."""
        known = [self.young.get(name, self.old.get(name)) for name in names]
        return [uses for uses in known if uses is not None]

    def use(self, names: list[BlockHash], count: int = 1) -> None:
        self.young |= {name: uses + count for name, uses in zip(names, self.uses(names), strict=False)}

    def use_all(self, names: list[BlockHash]) -> None:
        self.use(names, 0)
        self.young |= dict.fromkeys(names[len(self.uses(names)) :], 0)

    def forget(self) -> None:
        self.young, self.old = {}, {}

    def make_room(self) -> None:
        if len(self.young) > self._most_blocks // 2:
            self.young, self.old = {}, self.young


def prompt(dice: random.Random) -> list[BlockHash]:
    """Forks at any block; some are long, and most begin as others do."""
    name, blocks = "", []
    for _ in range(dice.choice((1, 2, 5, 9, 30, 100))):
        name += dice.choice("aaaaaaaab")
        blocks.append(BlockHash(name.encode()))
    return blocks


@pytest.mark.parametrize("most_blocks", [20, 100, 100_000])
@pytest.mark.parametrize("seed", range(6))
def test_a_group_knows_of_its_blocks_what_an_entry_for_each_would(seed: int, most_blocks: int) -> None:
    dice, watched, model = random.Random(seed), WatchedBlocks(), OneByOne(most_blocks)
    running: list[tuple[list[BlockHash], list[Group]]] = []
    for _ in range(800):
        ends = bool(running) and dice.random() < 0.5
        blocks, before = running.pop(dice.randrange(len(running))) if ends else (prompt(dice), [])
        count = len(blocks) if dice.random() < 0.8 else dice.randint(0, len(blocks))
        names = [blocks[depth - 1] for depth in DEPTHS if depth <= count]
        expected = model.uses(names)
        if ends:
            expected += [0] * (len(names) - len(expected))
            groups = watched.use_all(blocks, count, before)
            model.use_all(names)
        else:
            groups = watched.use(blocks, count)
            model.use(names)
            running.append((blocks, list(groups)))
        assert [group.begin for group in groups] == [0, *(group.end for group in groups)][: len(groups)]
        assert [group.uses for group in groups for _ in range(group.begin, group.end)] == expected
        assert sum(group.num_blocks for group in groups) == (groups[-1].depth if groups else 0)
        for group in groups:
            group.uses += not ends
        if ends:
            watched.make_room(most_blocks)
            model.make_room()
        if dice.random() < 0.01:
            watched.forget()
            model.forget()
        assert len(watched) == len(model.young) + len(model.old)


def test_what_the_same_requests_used_is_one_group_however_long() -> None:
    watched, looks = WatchedBlocks(), 0

    class Counting(list[BlockHash]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            nonlocal looks
            looks += 1
            return super().__getitem__(index)

    blocks = Counting(BlockHash(str(index).encode()) for index in range(1 << 14))
    assert [group.time for group in watched.use_all(blocks, len(blocks))] == [IN_USE]
    watched.use_all([BlockHash(b"other %d" % index) for index in range(1 << 14)], 1 << 14)
    watched.make_room(150)
    for most_looks in (2 + 60, 2):  # the first use after that names it anew
        looks = 0
        assert len(watched.use(blocks, len(blocks))) == 1
        assert looks <= most_looks


def test_what_is_still_so_is_not_looked_up_again() -> None:
    class Unread(list[BlockHash]):
        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            raise AssertionError("a name is looked up")

    watched = WatchedBlocks()
    blocks = [BlockHash(str(index).encode()) for index in range(500)]
    watched.use_all(blocks[:100], 100)
    before = watched.use_all(blocks, 500)
    assert len(before) == 2
    assert watched.use(Unread(blocks), 500, before) == before
