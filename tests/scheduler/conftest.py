"""Managers of these tests may name two eviction orders that no server offers: they show what the tree and the tiers
keep, whatever the order is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from fastdeploy_kvcache_v1.scheduler.policies.eviction import EVICTION_POLICIES, EvictionOrder
from fastdeploy_kvcache_v1.scheduler.reuse import history, judge
from fastdeploy_kvcache_v1.scheduler.run import QueueNode, Run


class FirstInFirstOut(EvictionOrder):
    """Use does not make a run younger."""

    def use(self, place: QueueNode, /) -> None:
        if not place.is_queued:
            super().use(place)


class Shuffled(EvictionOrder):
    """Whatever happens to a run sends it to either end of one of three queues, roots before leaves as it comes."""

    def __init__(self) -> None:
        super().__init__(3)
        self._random = random.Random(0)

    def enter(self, place: QueueNode, /, *, first: bool = False) -> None:
        self.use(place)

    def use(self, place: QueueNode, /) -> None:
        place.leave_queue()
        queue = self._random.choice(self.queues)
        (queue.touch if self._random.random() < 0.5 else queue.put_oldest)(place)

    def first(self) -> Run | None:
        return next(self.candidates(), None)

    def candidates(self) -> Iterator[Run]:
        for queue in self._random.sample(self.queues, 3):
            yield from queue


OTHER_POLICIES = {"test_fifo": lambda history: FirstInFirstOut(), "test_shuffled": lambda history: Shuffled()}
"""By names that no policy of the package has: it would not be tested."""


@pytest.fixture(autouse=True, scope="package")
def other_policies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, policy in OTHER_POLICIES.items():
            patch.setitem(EVICTION_POLICIES, name, policy)
        yield


@pytest.fixture(autouse=True, scope="package")
def fast_learning() -> Iterator[None]:
    """What a server learns in thousands of requests, these tests learn in some. A second of their clock is as long as
    the youngest ages that are told apart.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "REQUESTS_PER_REFRESH", 4)
        patch.setattr(judge, "SHORTEST", 1)
        yield
