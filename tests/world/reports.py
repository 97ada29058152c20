"""What ranks say of their copies, on its way to the engine: late, and in order."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

from fastdeploy_kvcache_v1.fastdeploy_integration.engine.copy_reports import NO_NEWS, CopyNews
from fastdeploy_kvcache_v1.metadata import TransferReport


class Reports:
    def __init__(self, world: Any) -> None:
        self._world = world
        self._underway: deque[tuple[int, TransferReport]] = deque()
        self._arrived: list[tuple[int, TransferReport]] = []

    @property
    def events(self) -> list[Any]:
        return [(8, self.arrive)]

    def tell(self, rank: int, report: TransferReport) -> None:
        self._underway.append((rank, report))

    def arrive(self, rng: random.Random) -> None:
        while self._underway and not self._world.faults.strike("late report", rng):
            self._arrived.append(self._underway.popleft())

    is_idle = True
    """The engine may be idle before it hears of all."""

    def check_idle(self) -> None:
        pass

    def take(self) -> CopyNews:
        if not self._arrived:
            return NO_NEWS
        arrived, self._arrived = self._arrived, []
        failed = [each for _, report in arrived for each in report.transfers if not each.ok]
        through = {rank: report.ended_through for rank, report in arrived}
        passes = {rank: report.passes for rank, report in arrived if report.passes is not None}
        prefills = {rank: report.prefills for rank, report in arrived}
        return CopyNews(tuple(failed), through, -1, passes, prefills)
