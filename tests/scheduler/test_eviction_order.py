"""Adaptive: its order against a plain sort of all runs, while sessions end, return, and tell right or wrong times."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.contract.sessions import LAST_TURN, session_hint
from fastdeploy_kvcache_v1.scheduler.cache_stats import Counters
from fastdeploy_kvcache_v1.scheduler.policies.eviction import Adaptive
from fastdeploy_kvcache_v1.scheduler.reuse import history
from fastdeploy_kvcache_v1.scheduler.reuse.claims import Claims
from fastdeploy_kvcache_v1.scheduler.reuse.history import ENDED, LEFT, NUM_CLASSES, TICKS_PER_SECOND, ReuseHistory
from fastdeploy_kvcache_v1.scheduler.reuse.rates import NUM_AGES
from fastdeploy_kvcache_v1.scheduler.run import Run

from .scenario import prompt

NUM_RUNS, NUM_SESSIONS = 36, 12
HALF_OCTAVE = 2**0.5 + 1e-9
"""Told waits in one queue differ by less than this factor."""


class Walk:
    """An order of runs without a cache: three runs of each session, and shared ones. `falling`: the older a block, the
    less it is worth, in every class.
    """

    def __init__(self, seed: int, *, trusts: bool, falling: bool = True) -> None:
        self.dice, self.seconds = random.Random(seed), 1000.0
        self.history = ReuseHistory(lambda: self.seconds, Counters(), lambda: 10**6, lambda: 100, 512)
        self.history.judge.trusts = trusts
        if trusts:
            self.history.worths = [self._row(falling) for _ in range(NUM_CLASSES)]
        self.order = Adaptive(self.history)
        self.runs = [Run.of([BlockHash(b"%d" % number)], [number]) for number in range(NUM_RUNS)]
        self.queued: dict[Run, None] = {}
        """The run that was queued first is the first."""

    def _row(self, falling: bool) -> list[float]:
        row = sorted((10 ** self.dice.uniform(-9, -2) for _ in range(NUM_AGES)), reverse=True)
        return row if falling or self.dice.random() < 0.5 else row[::-1]

    def runs_of(self, number: int) -> list[Run]:
        return self.runs[number::NUM_SESSIONS]

    def use(self, number: int, return_in_s: float | None) -> None:
        """A request of session `number` begins and ends."""
        sequence = prompt(chr(ord("a") + number) * 2)
        sequence.session = session_hint(str(number), return_in_s=return_in_s)
        session, _ = self.history.ended(sequence, 2, self.history.arrived(sequence, 0), 2)
        for run in self.runs_of(number):
            run.owner, run.use_class, run.last_use = session, session.use_class, self.history.now
            self._enter(run)

    def use_shared(self, run: Run) -> None:
        run.owner, run.use_class, run.last_use = None, self.dice.randrange(LEFT), self.history.now
        self._enter(run)

    def tell(self, number: int, return_in_s: float) -> None:
        session, has_changed = self.history.tell(session_hint(str(number), return_in_s=return_in_s))
        for run in self.runs_of(number):
            if session is not None and has_changed and run.is_queued:
                run.use_class = session.use_class
                self._enter(run)

    def _enter(self, run: Run) -> None:
        self.order.use(run)
        self.queued.pop(run, None)
        self.queued[run] = None

    def evict(self, run: Run) -> None:
        run.leave_queue()
        del self.queued[run]

    def step(self, *, tells: bool = True) -> None:
        self.seconds += self.dice.choice([0, 0, 0.01, 1, 60])
        self.history.now = int(self.seconds * TICKS_PER_SECOND)
        lot, number = self.dice.random(), self.dice.randrange(NUM_SESSIONS)
        told = self.dice.choice([LAST_TURN, 10 ** self.dice.uniform(3.5, 4.4)])
        if number == 0:
            self.use_shared(self.dice.choice(self.runs_of(0)))
        elif tells and lot < 0.3:
            self.tell(number, told)
        else:
            self.use(number, told if lot < 0.6 else None)

    def ended(self) -> list[Run]:
        return [run for run in self.queued if run.use_class == ENDED]


@pytest.fixture(autouse=True)
def nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "REQUESTS_PER_REFRESH", 10**9)
    monkeypatch.setattr(Claims, "believes", lambda claims, tenant: True)


@pytest.mark.parametrize("falling", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_next_victim_is_ended_or_worth_least_of_all_runs(seed: int, falling: bool) -> None:
    walk, num_ended, num_told = Walk(seed, trusts=True, falling=falling), 0, 0
    walk.use(1, None)
    for _ in range(1500):
        walk.step()
        if not falling:  # worths of the oldest runs may fall as they are used: they are compared again after a while
            walk.order._valid_until = 0
        first = next(walk.order.candidates())
        if ended := walk.ended():
            assert first is ended[0]
            num_ended += 1
        else:
            worths = {run: walk.history.worth(run) for run in walk.queued}  # after `candidates`: a time may be overdue
            assert worths[first] <= HALF_OCTAVE * min(worths.values())
            num_told += first.owner is not None and first.owner.due is not None
        if walk.dice.random() < 0.5 and len(walk.queued) > 1:
            walk.evict(first)
    assert min(num_ended, num_told) > 20


@pytest.mark.parametrize("seed", range(4))
def test_candidates_that_were_not_told_follow_by_their_worth(seed: int) -> None:
    walk = Walk(seed, trusts=True)
    walk.history.ended_first = False
    for _ in range(300):
        walk.step(tells=False)
        found = list(walk.order.candidates())
        assert set(found) == set(walk.queued)
        assert len(found) == len(walk.queued)
        untold = [walk.history.worth(run) for run in found[1:] if run.owner is None or run.owner.due is None]
        assert untold == sorted(untold)


@pytest.mark.parametrize("seed", range(4))
def test_order_is_recency_whatever_was_told_while_recency_rules(seed: int) -> None:
    walk = Walk(seed, trusts=False)
    walk.history.ended_first = False
    for _ in range(300):
        walk.step(tells=False)
        found = [run.last_use for run in walk.order.candidates()]
        assert found == sorted(run.last_use for run in walk.queued)
