"""ReuseHistory: what it says of prompts, against a record of every request; bounds of its memory and its work."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count

import pytest

from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.contract.sessions import LAST_TURN, session_hint
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_stats import Counters
from fastdeploy_kvcache_v1.scheduler.reuse.history import (
    ALL_BLOCKS,
    ENDED,
    FIRST_TURN,
    MOST_USES,
    NUM_CLASSES,
    TICKS_PER_SECOND,
    USE_CLASSES,
    ReuseHistory,
    Stretch,
    Visit,
)
from fastdeploy_kvcache_v1.scheduler.reuse.sessions import Session
from fastdeploy_kvcache_v1.scheduler.reuse.watched import DEPTHS, IN_USE, last_watched
from fastdeploy_kvcache_v1.scheduler.run import Run

from ..scenario import cached, manager, prompt, run, start


def hashes(name: object, count: int) -> list[BlockHash]:
    return [BlockHash(f"{name} {index}".encode()) for index in range(count)]


def made(*, watched: int = 100_000, evictable: int = 100) -> ReuseHistory:
    """A history whose clock is a second later each time that it looks."""
    return ReuseHistory(count().__next__, Counters(), lambda: watched, lambda: evictable, 512)


def end(history: ReuseHistory, blocks: list[BlockHash], visit: Visit | None) -> tuple[Session, list[Stretch]]:
    return history.ended(GivenHashes(blocks, len(blocks) + 1), len(blocks), visit, len(blocks))


def serve(history: ReuseHistory, blocks: list[BlockHash]) -> list[Stretch]:
    """One request that computes all its blocks."""
    return end(history, blocks, history.arrived(GivenHashes(blocks, len(blocks) + 1), 0))[1]


def name(run: Run) -> str:
    return b"".join(block[-1:] for block in run.hashes).decode()


def test_last_watched_is_the_deepest_watched_block_of_a_prompt() -> None:
    assert [last_watched(depth) for depth in (0, 1, 7, 8, 9, 11, 12, 13)] == [0, 1, 6, 8, 8, 8, 12, 12]


def test_stretches_count_uses_of_shared_blocks_even_if_they_are_not_cached() -> None:
    history = made()
    system, chat = hashes("system", 16), hashes("chat", 16)
    assert serve(history, system + hashes("other", 10)) == [], "all are its own"
    assert serve(history, system + chat) == [(16, 1)]
    assert serve(history, system + chat + hashes("more", 16)) == [(16, 2)], "the same session, with its own blocks"
    assert serve(history, system + chat + hashes("fork", 16)) == [(32, 2)]
    for _ in range(20):
        stretches = serve(history, system + chat)
    assert stretches == [(32, USE_CLASSES[MOST_USES])]


def check_weights(history: ReuseHistory, sessions: set[Session]) -> None:
    """Sums of all ages, by class, against the blocks and the sessions that are not in use."""
    expected = [0.0] * (NUM_CLASSES + 1)
    for group in {*history._watched._old.values(), *history._watched._young.values()}:
        if group.time != IN_USE:
            expected[ALL_BLOCKS] += group.num_blocks
            if group.owner is None:
                expected[group.use_class] += group.num_blocks
    for session in sessions:
        if session.last_use != IN_USE:
            expected[session.use_class] += session.weight
    weights = [sum(column) for column in zip(*(each for _, _, each in history._ages.spans(history.now)), strict=True)]
    assert weights == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(8))
def test_against_a_record_of_every_request(seed: int) -> None:
    """Prompts of a tree, some of them in use at the same time, of up to 8 blocks."""
    dice, history = random.Random(seed), made(evictable=50)
    found: Counter[BlockHash] = Counter()
    users: dict[BlockHash, set[Session]] = {}
    running: list[tuple[list[BlockHash], Visit | None]] = []
    sessions: set[Session] = set()
    for _ in range(600):
        check_weights(history, sessions)
        if running and dice.random() < 0.5:
            blocks, visit = running.pop(dice.randrange(len(running)))
            session, stretches = end(history, blocks, visit)
            sessions.add(session)
            for block in blocks:
                users.setdefault(block, set()).add(session)
            assert stretches == sorted(stretches, reverse=True)
            for depth in filter(len(blocks).__ge__, DEPTHS):
                block = blocks[depth - 1]
                classes = [use_class for deepest, use_class in stretches if deepest >= depth]
                assert bool(classes) == (len(users[block]) > 1), "it has a stretch if several sessions use it"
                assert not classes or classes[-1] == USE_CLASSES[min(found[block], MOST_USES)]
        else:
            name, blocks = "", []
            for _ in range(dice.choice((1, 2, 3, 4, 6, 8))):
                name += dice.choice("ab")
                blocks.append(BlockHash(name.encode()))
            visit = history.arrived(GivenHashes(blocks, len(blocks) + 1), 0)
            for block in blocks:
                if block in users:
                    found[block] += 1
                    users[block].add(visit.session)
            running.append((blocks, visit if dice.random() < 0.9 else None))


def test_client_that_puts_its_return_off_for_ever_is_not_believed() -> None:
    seconds = [0.0]
    history = ReuseHistory(lambda: seconds[0], Counters(), lambda: 10**6, lambda: 100, 512)
    hints = [session_hint(name, return_in_s=5.0) for name in "xy"]
    for hint in hints:
        sequence = GivenHashes(hashes(hint.name.hex(), 8), 9, hint)
        session, _ = history.ended(sequence, 8, history.arrived(sequence, 0), 8)
        assert session.due is not None
    for seconds[0] in range(4, 4000, 4):
        for hint in hints:
            history.tell(hint)
    told = [history.tell(hint)[0] for hint in hints]
    assert [session is not None and session.due for session in told] == [None, None]
    assert history._counters.wrong_told_returns > 4


def test_end_that_is_told_again_or_taken_back_is_no_further_claim() -> None:
    history, blocks = made(), hashes("chat", 8)
    hint = session_hint("x", return_in_s=LAST_TURN)
    sequence = GivenHashes(blocks, 9, hint)
    history.ended(sequence, 8, history.arrived(sequence, 0), 8)
    for _ in range(3):
        history.tell(hint)
    assert history.claims._counts[b""] == (1, 0)
    history.tell(hint._replace(return_in_s=5.0))
    assert history.claims._counts[b""] == (0, 0)


def test_session_that_is_told_to_have_ended_changes_its_class_at_once() -> None:
    history, blocks = made(), hashes("chat", 8)
    hint = session_hint("x", return_in_s=LAST_TURN)
    sequence = GivenHashes(blocks, 9, hint._replace(return_in_s=None))
    session, _ = history.ended(sequence, 8, history.arrived(sequence, 0), 8)
    assert session.use_class == FIRST_TURN
    assert history.tell(hint) == (session, True)
    assert session.use_class == ENDED
    check_weights(history, {session})
    history.forget()
    assert history.tell(hint) == (None, False)
    check_weights(history, set())


def test_rates_learn_class_age_and_weight_of_each_use(monkeypatch: pytest.MonkeyPatch) -> None:
    now, learned = [0], list[tuple[float, ...]]()
    history = ReuseHistory(lambda: now[0], Counters(), lambda: 1000, lambda: 100, 512)
    monkeypatch.setattr(history._rates, "used_again", lambda *use: learned.append(use))
    system, chat = hashes("system", 8), hashes("chat", 4)
    uses = []
    for now[0], blocks in ((0, hashes("a", 4)), (10, hashes("b", 4)), (30, chat), (60, chat + hashes("turn", 4))):
        serve(history, system + blocks)
        uses.append([(number, age / TICKS_PER_SECOND, weight) for number, age, weight in learned])
        learned.clear()
    assert uses == [[], [(FIRST_TURN, 10, 2 / 3)], [(1, 20, 8)], [(2, 30, 8), (FIRST_TURN, 30, 1)]]


def test_fork_takes_its_share_of_what_is_left_of_a_session() -> None:
    history, blocks = made(), hashes("chat", 8)
    session, _ = end(history, blocks, None)
    weights = [session.weight]
    for depth in (4, 6):
        serve(history, blocks[:depth] + hashes(("fork", depth), 8))
        weights.append(session.weight)
    assert weights == [1.0, 0.5, 0.25]


def test_judge_compares_hits_with_blocks_that_lru_would_still_hold() -> None:
    history, blocks = made(), hashes("chat", 8)
    serve(history, blocks)
    counts = []
    for lru_age, num_cached in ((1, 8), (1 << 40, 8), (1 << 40, 5)):
        history.lru_age = lru_age
        sequence = GivenHashes(blocks, 9)
        end(history, blocks, history.arrived(sequence, num_cached))
        counts.append((history.judge._found, history.judge._estimate))
    assert counts == [(8, 0), (16, 8), (20, 16)], "only watched blocks are compared: 4 of 5"


@pytest.mark.parametrize("are_used", [False, True])
def test_ended_sessions_leave_first_unless_others_use_their_blocks_again(are_used: bool) -> None:
    history = made(evictable=20)
    for number in range(100):
        blocks = hashes(number, 8)
        sequence = GivenHashes(blocks, 9, session_hint(None, return_in_s=LAST_TURN))
        history.ended(sequence, 8, history.arrived(sequence, 0), 8)
        if are_used:
            serve(history, blocks[:6] + hashes((number, "fork"), 8))
        chat = hashes(("chat", number // 4), 2 + number % 4)
        serve(history, chat)
    assert history.ended_first is not are_used


def test_predicted_returns_are_about_as_many_as_real_ones() -> None:
    """Conversations of ten turns behind a shared prefix, the uses of which are not returns."""
    dice, history, system = random.Random(1), made(evictable=20), hashes("system", 8)
    turns: Counter[int] = Counter()
    for _ in range(3000):
        place = dice.randrange(24)
        chat, turn = divmod(turns[place], 10)
        turns[place] += 1
        serve(history, system + hashes(("chat", place, chat), 1 + turn))
    counters = history._counters
    assert counters.continued_session_requests == sum(turn - -(-turn // 10) for turn in turns.values())
    assert counters.predicted_session_returns == pytest.approx(counters.continued_session_requests, rel=0.1)


def test_what_was_used_long_ago_counts_less() -> None:
    history, uses = made(evictable=4), []
    for number in range(400):
        serve(history, hashes("system", 8) + hashes(number, 8) if number < 100 else hashes(number, 8))
        uses.append(sum(map(sum, history._rates._used)) / history._rates._unit)
    assert uses[399] < 0.8 * uses[100]


def test_memory_is_bounded_and_the_start_of_a_prompt_is_forgotten_last() -> None:
    history = made(watched=1000)
    for number in range(400):
        serve(history, hashes(number, 48) + hashes((number, "end"), 8))
        assert len(history) <= 1000 + 2 * 4 * 11, "it looks after every 4 requests"
    assert serve(history, hashes(399, 48) + hashes("fork", 8)) == [(48, 1)]
    assert serve(history, hashes(0, 48) + hashes("fork", 8)) == []


def test_a_request_that_was_only_matched_or_resumes_teaches_nothing() -> None:
    cache = manager(8, eviction_policy="adaptive")
    run(cache, "ab!")
    taught = cache._history._num_requests
    cache.match_prefix("waits", prompt("ab!"))
    cache.release("waits")
    start(cache, "ab!", "resumes")
    cache.preempt("resumes")
    cache.match_prefix("resumes", prompt("ab!"), resumed=True)
    cache.allocate("resumes", 3)
    cache.take_swap_step()
    cache.finish("resumes")
    assert cache._history._num_requests == taught == 1


def test_nothing_is_watched_for_an_order_that_does_not_learn() -> None:
    cache = manager(8, eviction_policy="lru")
    run(cache, "ab!")
    assert cache.stats().watched_blocks == 0
    assert cache.stats().recency_rules


def test_reset_forgets_watched_blocks_and_keeps_learned_rates() -> None:
    cache = manager(8, eviction_policy="adaptive")
    for text in ("ab!", "ab!", "cd!"):
        run(cache, text)
    rates = cache._history._rates
    assert (cache.stats().watched_blocks, cache.stats().sessions) == (4, 2)
    cache.reset_cache()
    assert (cache.stats().watched_blocks, cache.stats().sessions) == (0, 0)
    assert cache._history._rates is rates
    run(cache, "ab!")
    assert cache.stats().watched_blocks == 2
    cache.check_idle()


def test_new_run_belongs_to_its_session_until_another_one_uses_it() -> None:
    """Whatever was known of its blocks when they were cached before."""
    cache = manager(8, eviction_policy="adaptive")
    for text in ("abcd1!", "abcd2!", "12345678!"):
        run(cache, text)
    assert cached(cache, "a") == []
    for text, expected in (
        ("abcd5678!", {"abcd5678": (FIRST_TURN, True)}),
        ("abcd90!", {"abcd": (2, False), "56": (FIRST_TURN, True), "90": (FIRST_TURN, True)}),
    ):
        run(cache, text)
        runs = {name(each): (each.use_class, each.owner is not None) for each in cache._tree.runs()}
        assert runs == expected


def test_recency_is_not_judged_before_anything_had_to_leave() -> None:
    cache = manager(1000, eviction_policy="adaptive")
    for number in range(100):
        run(cache, f"{chr(256 + number)}b!")
    assert cache.stats().recency_rules
    small = manager(10, eviction_policy="adaptive")
    for number in range(100):
        run(small, f"{chr(256 + number)}b!")
    assert not small.stats().recency_rules
