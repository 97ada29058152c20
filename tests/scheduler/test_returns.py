"""Eviction by when sessions come back, as their clients tell: the order, what counts as told, and whom to believe."""

from __future__ import annotations

from typing import Any

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import Allocation, CacheLevel
from fastdeploy_kvcache_v1.contract.sessions import LAST_TURN, session_hint
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.policies.eviction import Adaptive
from fastdeploy_kvcache_v1.scheduler.reuse.claims import GRACE
from fastdeploy_kvcache_v1.scheduler.reuse.history import (
    ENDED,
    FIRST_TURN,
    LEFT,
    NUM_CLASSES,
    TICKS_PER_SECOND,
    TOOL_CALL,
)
from fastdeploy_kvcache_v1.scheduler.reuse.judge import Judge
from fastdeploy_kvcache_v1.scheduler.reuse.rates import NUM_AGES, ReuseRates, worthless
from fastdeploy_kvcache_v1.scheduler.run import Run

from .scenario import cached, prompt


class Timed:
    """A manager with a clock that stands still between requests. Learned rates rule; they know nothing."""

    def __init__(self, device: int, host: int = 0, policy: str = "auto", *, trusts: bool = True) -> None:
        self.seconds = 0.0
        config = KVCacheConfig(device, host, block_size=1, eviction_policy="adaptive", write_policy=WritePolicy(policy))
        self.cache = CacheManager(config, clock=lambda: self.seconds)
        self.cache._history.judge.trusts = trusts

    def begin(
        self,
        text: str,
        session: str = "",
        return_in_s: float | None = None,
        salt: bytes = b"",
        *,
        calls_tool: bool = False,
    ) -> str:
        """Match and compute the blocks of a prompt."""
        hint = session_hint(session, salt, return_in_s)._replace(calls_tool=calls_tool)
        self.cache.match_prefix(text, GivenHashes(prompt(text).hashes, len(text) + 1, hint))
        assert isinstance(self.cache.allocate(text, len(text)), Allocation)
        self.cache.take_swap_step()
        self.cache.commit(text, len(text))
        self.cache.check()
        return text

    def run(self, text: str, *told: Any, calls_tool: bool = False, **named: Any) -> None:
        """A whole request, see `begin`."""
        self.cache.finish(self.begin(text, *told, calls_tool=calls_tool, **named))
        self.cache.check()

    def tell(self, session: str, return_in_s: float, salt: bytes = b"") -> bool:
        told = self.cache.tell_return(session_hint(session, salt, return_in_s))
        self.cache.check()
        return told

    def order(self) -> str:
        """Runs of the device in eviction order, separated by spaces."""
        return " ".join(name(run) for run in self.cache._residency.device_order.candidates())

    def classes(self) -> dict[str, int]:
        return {name(run): run.use_class for run in self.cache._tree.runs()}

    def wrong(self) -> int:
        return self.cache.stats().counters.wrong_told_returns


def name(run: Run) -> str:
    return b"".join(block[-1:] for block in run.hashes).decode()


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> list[list[float]]:
    """Worths by class and age, for tests to fill. What rules stays."""
    monkeypatch.setattr(Judge, "refresh", lambda judge: None)
    worths = worthless(NUM_CLASSES)
    monkeypatch.setattr(ReuseRates, "learned", lambda rates, *doubts: worths)
    return worths


def fill(rates: list[list[float]], worth: float) -> None:
    for row in rates:
        row[:] = [worth] * NUM_AGES


# ---- the order of told times


def test_session_that_comes_back_last_leaves_first() -> None:
    cache = Timed(9)
    for text, return_in_s in (("a", 100), ("b", 1000), ("c", 10)):
        cache.run(text, return_in_s=return_in_s)
    assert cache.order() == "b a c"
    cache.run("1234567")
    assert cached(cache.cache, "b") == []
    assert cached(cache.cache, "a") == cached(cache.cache, "c") == ["device"]


def test_waits_are_compared_as_they_are_now() -> None:
    cache = Timed(9)
    cache.run("a", return_in_s=1000)
    cache.seconds = 900
    cache.run("b", return_in_s=300)
    assert cache.order() == "b a"


def test_told_times_are_ignored_while_recency_rules() -> None:
    cache = Timed(9, trusts=False)
    for text, return_in_s in (("a", 100), ("b", 1000), ("c", 10)):
        cache.seconds += 1
        cache.run(text, return_in_s=return_in_s)
    assert cache.order() == "a b c"


def test_told_time_is_weighed_against_the_learned_rates(rates: list[list[float]]) -> None:
    fill(rates, 1 / (50 * TICKS_PER_SECOND))
    cache = Timed(9)
    cache.cache._history.worths = rates
    for text, return_in_s in (("a", 10), ("b", 1000), ("c", None)):
        cache.run(text, return_in_s=return_in_s)
    assert cache.order() == "b c a"


def test_told_time_of_a_session_does_not_concern_blocks_that_others_use() -> None:
    cache = Timed(9)
    cache.run("ab", return_in_s=1000)
    cache.run("acd", return_in_s=10)
    due = {name(run): run.owner and run.owner.due for run in cache.cache._tree.runs()}
    assert due == {"a": None, "b": None, "cd": 10 * TICKS_PER_SECOND}, "`b` is left behind"
    assert cache.order().split()[-1] == "cd"


def test_session_that_called_a_tool_is_of_another_class_until_its_next_end() -> None:
    cache = Timed(9)
    for text, session, return_in_s, calls_tool in (
        ("a", "told", LAST_TURN, True),
        ("b", "calls", None, True),
        ("c", "answers", None, False),
    ):
        cache.run(text, session, return_in_s, calls_tool=calls_tool)
    assert cache.classes() == {"a": ENDED, "b": TOOL_CALL, "c": FIRST_TURN}
    cache.run("bd", "calls")
    assert cache.classes() == {"a": ENDED, "bd": FIRST_TURN + 1, "c": FIRST_TURN}


def test_answer_without_a_told_time_leaves_the_session_to_the_rates() -> None:
    cache = Timed(9)
    cache.run("a", return_in_s=1000)
    cache.seconds = 1000
    cache.run("ab")
    (run,) = cache.cache._tree.runs()
    assert run.owner is not None
    assert run.owner.due is None


# ---- ended sessions


@pytest.mark.parametrize("trusts", [False, True])
def test_blocks_of_an_ended_session_leave_first_whatever_rules(trusts: bool) -> None:
    cache = Timed(9, trusts=trusts)
    for text, return_in_s in (("a", None), ("b", 5000), ("c", LAST_TURN)):
        cache.seconds += 1
        cache.run(text, return_in_s=return_in_s)
    assert cache.order().split()[0] == "c"
    cache.cache._history.ended_first = False
    assert trusts or cache.order().split()[0] == "a"


def test_end_of_a_session_does_not_evict_what_it_shares() -> None:
    cache = Timed(9)
    for text in ("abc", "abd"):
        cache.run(text)
    cache.run("abde", return_in_s=LAST_TURN)
    classes = cache.classes()
    assert classes == {"ab": 2, "c": LEFT, "de": ENDED}
    assert cache.order().split()[0] == "de"


def test_ended_session_that_comes_back_has_not_ended() -> None:
    cache = Timed(9)
    cache.run("a", "x", LAST_TURN)
    assert cache.wrong() == 0
    cache.seconds = 5
    cache.run("ab", "x")
    assert cache.classes() == {"ab": FIRST_TURN + 1}
    assert cache.wrong() == 1


@pytest.mark.parametrize(("policy", "copies"), [("auto", 0), ("write_back", 3)])
def test_ended_session_is_copied_by_write_policies_that_do_not_weigh_alone(policy: str, copies: int) -> None:
    cache = Timed(3, 9, policy)
    cache.run("abc", return_in_s=LAST_TURN)
    cache.run("123")
    counters = cache.cache.stats().counters
    assert cached(cache.cache, "abc") == ["host"] * copies
    assert counters.backup_declined_blocks == 3 - copies
    cache.run("456")
    assert cached(cache.cache, "123") == ["host"] * 3, "nobody said that it has ended"


def test_ended_sessions_are_copied_where_others_use_their_blocks_again() -> None:
    cache = Timed(3, 9)
    cache.cache._history.ended_first = False
    cache.run("abc", return_in_s=LAST_TURN)
    cache.run("123")
    assert cached(cache.cache, "abc") == ["host"] * 3


# ---- sessions left behind


def test_prompt_of_a_client_that_does_not_go_on_leaves_its_last_one_behind() -> None:
    cache = Timed(9)
    cache.run("abc", "x", 100)
    cache.run("123", "x")
    assert cache.classes() == {"abc": LEFT, "123": FIRST_TURN + 1}, "the client has had two turns"
    cache.run("abcd", "y")
    assert cache.classes()["123"] == FIRST_TURN + 1


def test_fork_leaves_behind_what_it_does_not_share() -> None:
    cache = Timed(9)
    cache.run("abcd", return_in_s=100)
    cache.run("abef")
    assert cache.classes() == {"ab": 1, "cd": LEFT, "ef": FIRST_TURN + 1}


def test_second_prompt_behind_a_shared_prefix_leaves_nobody_behind() -> None:
    cache = Timed(9)
    for text in ("ab1", "ab2", "ab3"):
        cache.run(text)
    assert cache.classes() == {"ab": 2, "1": LEFT, "2": FIRST_TURN + 1, "3": FIRST_TURN}


def test_prompt_that_is_sent_again_continues_its_session() -> None:
    cache = Timed(9)
    for session in ("x", "x", ""):
        cache.run("ab", session)
    assert cache.classes() == {"ab": FIRST_TURN + 2}
    assert cache.cache.stats().counters.continued_session_requests == 2


def test_named_sessions_with_one_prompt_do_not_continue_each_other() -> None:
    cache = Timed(9)
    cache.run("ab", "x")
    cache.run("abc", "y")
    assert cache.classes() == {"ab": 1, "c": FIRST_TURN + 1}
    assert cache.cache.stats().counters.continued_session_requests == 0


# ---- the other end of a queue


def test_class_that_comes_back_only_after_a_while_loses_its_youngest_first(rates: list[list[float]]) -> None:
    rates[FIRST_TURN][:] = [0.001 * (1 + age) for age in range(NUM_AGES)]
    cache = Timed(9)
    cache.cache._history.worths = rates
    for text in "abc":
        cache.run(text)
        cache.seconds += 10
    assert cache.order().split()[0] == "c"
    cache.begin("cd")
    assert cache.order().split()[0] == "b", "a run in use cannot leave"
    rates[FIRST_TURN].reverse()
    cache.cache._residency.device_order._best = None  # type: ignore[attr-defined]
    assert cache.order().split()[0] == "a"


@pytest.mark.parametrize(("level", "worth", "first"), [("device", 0.6, "b"), ("host", 0.6, "a"), ("host", 0.4, "b")])
def test_youngest_host_copy_leaves_first_only_if_worth_less_than_half(
    rates: list[list[float]], level: str, worth: float, first: str
) -> None:
    rates[1][:] = [worth] + [1.0] * (NUM_AGES - 1)
    cache = Timed(9, 9)
    history, order = cache.cache._history, Adaptive(cache.cache._history)
    history.worths, history.now = rates, 1 << 20
    for text, last_use in (("a", 0), ("b", history.now)):
        run = Run.of(prompt(text).hashes, [0], CacheLevel(level))
        run.use_class, run.last_use = 1, last_use
        order.use(run.host or run)
    assert name(next(order.candidates())) == first


def test_run_that_stands_for_its_queue_from_now_on_is_compared(rates: list[list[float]]) -> None:
    for use_class, (young, old) in ((1, (0.8, 0.5)), (2, (0.9, 0.1)), (3, (0.05, 0.05))):
        rates[use_class][:] = [young] + [old] * (NUM_AGES - 1)
    cache = Timed(9)
    history, order = cache.cache._history, cache.cache._residency.device_order
    history.worths, history.now, history.lru_age = rates, 1 << 20, 1 << 30
    runs = {text: Run.of(prompt(text).hashes, [0]) for text in "azbcd"}
    for run, use_class, last_use in zip(runs.values(), (1, 1, 2, 2, 3), (0, 1 << 20, 1 << 20, 0, 0), strict=True):
        run.use_class, run.last_use = use_class, last_use
    for text in "azb":
        order.use(runs[text])
    assert next(order.candidates()) is runs["a"]
    order.enter(runs["c"], first=True)
    assert next(order.candidates()) is runs["c"], "it had to wait, and is the oldest"
    order.use(runs["d"])
    assert next(order.candidates()) is runs["d"], "it is the only one"


# ---- told later


def test_told_later_decides_as_if_told_with_the_request() -> None:
    cache = Timed(9)
    for text in "abc":
        cache.run(text, text)
    cache.seconds = 50
    assert cache.tell("a", 10)
    assert cache.tell("b", 1000)
    assert cache.tell("c", LAST_TURN)
    assert cache.order() == "c b a"
    cache.seconds = 60
    cache.run("ad", "a")
    assert cache.wrong() == 0


def test_told_while_a_request_runs_counts_at_its_end() -> None:
    cache = Timed(9)
    cache.run("a", "x")
    running = cache.begin("ab", "x")
    assert cache.tell("x", LAST_TURN)
    cache.cache.finish(running)
    assert cache.classes() == {"ab": ENDED}


def test_unknown_session_cannot_be_told_about() -> None:
    cache = Timed(9)
    cache.run("a", "x", salt=b"salt")
    assert not cache.tell("y", 10)
    assert not cache.tell("x", 10), "of another tenant"
    assert cache.tell("x", 10, b"salt")
    cache.cache.reset_cache()
    assert not cache.tell("x", 10, b"salt")
    assert cache.cache.stats().counters.told_returns == 1


def test_session_whose_blocks_are_gone_can_be_told_about() -> None:
    cache = Timed(2)
    cache.run("ab", "x")
    cache.run("12")
    assert cached(cache.cache, "a") == []
    assert cache.tell("x", LAST_TURN)
    assert cache.order() == "12"


# ---- whether told times held


@pytest.mark.parametrize(("gap", "wrong"), [(2, 1), (2.5, 0), (10, 0), (44, 0), (44.5, 1)])
def test_told_time_is_wrong_beyond_a_factor_of_4_and_a_second(gap: float, wrong: int) -> None:
    cache = Timed(9)
    cache.seconds = 100
    cache.run("a", return_in_s=10)
    cache.seconds += gap
    cache.run("ab")
    assert cache.wrong() == wrong


def test_overdue_session_is_queued_by_its_class_and_counted_wrong_once() -> None:
    cache = Timed(3)
    cache.run("a", return_in_s=10)
    cache.cache._history.now = 44 * TICKS_PER_SECOND
    assert cache.order() == "a"
    (run,) = cache.cache._tree.runs()
    assert run.owner is not None
    assert (run.owner.due, cache.wrong()) == (10 * TICKS_PER_SECOND, 0)
    for seconds in (45, 46):
        cache.cache._history.now = seconds * TICKS_PER_SECOND
        assert cache.order() == "a"
        assert (run.owner.due, cache.wrong()) == (None, 1)


def test_tenant_whose_sessions_never_come_in_time_is_not_believed() -> None:
    cache = Timed(40)
    for number in range(1 + GRACE):
        cache.run(f"{number}", return_in_s=10)
    cache.cache._history.now = 45 * TICKS_PER_SECOND
    cache.order()
    assert cache.wrong() == 1 + GRACE
    assert not cache.cache._history.claims.believes(b"")


def test_tenant_that_lies_is_not_believed_and_others_are() -> None:
    cache = Timed(40)
    for turn in range(1, 3 + GRACE):
        cache.run("abcdefghi"[:turn], "x", LAST_TURN, salt=b"liar")
        cache.seconds += 5
    assert cache.classes() == {"abcdefghi"[:turn]: FIRST_TURN + turn - 1}, "not ended"
    cache.run("1", "y", 100, salt=b"liar")
    cache.run("2", "y", 100)
    due = {name(run): run.owner.due for run in cache.cache._tree.runs() if run.owner is not None}
    assert due["1"] is None
    assert due["2"] is not None


def test_told_time_of_a_preempted_request_counts_when_it_has_ended() -> None:
    cache = Timed(9)
    cache.cache.preempt(cache.begin("ab", return_in_s=100))
    assert cache.cache.stats().counters.told_returns == 0
    cache.run("ab", return_in_s=100)
    assert cache.cache.stats().counters.told_returns == 1


# ---- what is to be seen


def test_metrics_count_named_continued_and_told_sessions() -> None:
    cache = Timed(40)
    for text, session, told in (("a", "x", 10), ("ab", "x", LAST_TURN), ("1", "", None), ("12", "", None)):
        cache.run(text, session, told)
        cache.seconds += 10
    cache.run("z", "y")
    cache.tell("y", 5)
    stats = cache.cache.stats()
    counters = stats.counters
    assert (counters.named_session_requests, counters.continued_session_requests) == (3, 2)
    assert (counters.told_returns, counters.wrong_told_returns) == (3, 0)
    assert stats.sessions == 3
