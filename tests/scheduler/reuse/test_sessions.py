"""SessionTable: which session a request continues, against plain dictionaries of all prompts; bounds of its memory."""

from __future__ import annotations

import gc
import random
from collections import defaultdict
from contextlib import suppress
from typing import Any

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import NoSpace
from fastdeploy_kvcache_v1.contract.sessions import SessionHint, session_hint
from fastdeploy_kvcache_v1.errors import PoolInUseError
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_stats import Counters
from fastdeploy_kvcache_v1.scheduler.reuse import claims, sessions
from fastdeploy_kvcache_v1.scheduler.reuse import history as history_module
from fastdeploy_kvcache_v1.scheduler.reuse.history import ReuseHistory, Visit
from fastdeploy_kvcache_v1.scheduler.reuse.sessions import Session
from fastdeploy_kvcache_v1.scheduler.reuse.watched import DEPTHS
from fastdeploy_kvcache_v1.scheduler.run import Run

from ..scenario import cached, manager, prompt, run


class Talk:
    def __init__(self, turns: int) -> None:
        self.name, self.end, self.stem, self.split, self.turns = "", "", "", 0, turns
        self.is_idle = False

    def goes_on_with(self, text: str) -> bool:
        return text.startswith(self.end) or self.rewrites_its_end(text)

    def rewrites_its_end(self, text: str) -> bool:
        return len(text) > len(self.end) and len(self.stem) > self.split and text.startswith(self.stem)


class Record:
    """A plain record of prompts, which are texts: a block is a character with everything before it."""

    def __init__(self, most: int, rewritten: int) -> None:
        self._most = most
        self._rewritten = rewritten
        self.ends: dict[str, Talk] = {}
        self.stems: dict[str, Talk] = {}
        self.names: dict[str, Talk] = {}
        self.marks: dict[str, None] = {}
        self.users: dict[str, set[Talk]] = defaultdict(set)
        """Sessions that used a watched block."""

    def _keep(self, known: dict[str, Any], key: str, value: Any) -> None:
        known.pop(key, None)
        known[key] = value
        while len(known) > self._most:
            del known[min(known, key=list(known).index)]

    def watched(self, text: str) -> list[str]:
        return [text[:depth] for depth in DEPTHS if depth <= len(text)]

    def arrived(self, text: str, name: str) -> tuple[Talk, Talk | None]:
        known = [block for block in self.watched(text) if self.users[block]]
        named, left = self.names.get(name), None
        if named is not None and named.goes_on_with(text):
            talk = named
        else:
            found = self._found(text)
            if found is not None:
                own = len(found.end if text.startswith(found.end) else (["", *self.watched(found.stem)])[-1])
                is_shared = any(len(self.users[block]) > 1 for block in known if len(block) >= own)
            if found is None or not found.goes_on_with(text) or is_shared or (name and found.name not in ("", name)):
                users = self.users[known[-1]] if known else set()
                left = named or (next(iter(users)) if len(users) == 1 else None)
                talk = Talk(left.turns if left else 0)
            else:
                talk, left = found, named
            if name:
                talk.name = name
                self._keep(self.names, name, talk)
        for block in known:
            self.users[block].add(talk)
        if left is None and talk.is_idle and not text.startswith(talk.end):
            left = talk
        talk.is_idle = False
        return talk, left

    def _found(self, text: str) -> Talk | None:
        deepest = max((mark for mark in self.marks if text.startswith(mark)), key=len, default="")
        found = []
        for known in (self.ends, self.stems):
            near = [
                end
                for end in known
                if text.startswith(end)
                and (self.watched(end)[-1] == deepest or len(deepest) - self._rewritten <= len(end) < len(deepest))
            ]
            found += [(len(end), known[end]) for end in [max(near, key=len, default=None)] if end is not None]
        return max(found, key=lambda each: each[0])[1] if deepest and found else None

    def ended(self, talk: Talk, text: str, output: str) -> None:
        talk.turns += 1
        talk.is_idle = True  # as soon as one of its requests has ended
        talk.split = len(talk.stem)
        for known, before in ((self.ends, talk.end), (self.stems, talk.stem)):
            if known.get(before) is talk:
                del known[before]
        talk.end, talk.stem = text, text[: max(0, len(text) - self._rewritten)]
        for known, end in ((self.ends, talk.end), (self.stems, talk.stem)):
            if end:
                self._keep(known, end, talk)
                self._keep(self.marks, self.watched(end)[-1], None)
        if talk.name and self.names.get(talk.name, talk) is talk:
            self._keep(self.names, talk.name, talk)
        for block in self.watched(text + output):
            self.users[block].add(talk)


@pytest.mark.parametrize("rewritten", [0, 1, 3])
@pytest.mark.parametrize("most", [4, 1000])
@pytest.mark.parametrize("seed", range(6))
def test_sessions_of_requests_equal_those_of_a_plain_record(
    seed: int, most: int, rewritten: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sessions named, inferred, forked and wrongly named, several requests at a time, while the clock may stand."""
    monkeypatch.setattr(sessions, "PIECE", 2)
    monkeypatch.setattr(sessions, "MOST_SESSIONS", most)
    dice, now = random.Random(seed), [0.0]
    size = sessions.REWRITTEN_TOKENS // max(1, rewritten) if rewritten else 512
    history = ReuseHistory(lambda: now[0], Counters(), lambda: 10**6, lambda: 100, size)
    record = Record(most, rewritten)
    running: list[tuple[str, Visit, Talk, Any]] = []
    texts, same, num_continued, num_left = [""], dict[Talk, Session](), 0, 0
    for _ in range(800):
        now[0] += dice.choice([0, 0, 0.01, 3, 500])
        if running and dice.random() < 0.5:
            text, visit, talk, sequence = running.pop(dice.randrange(len(running)))
            output = "".join(dice.choices("xyz", k=dice.randrange(3)))
            sequence.hashes = prompt(text + output).hashes
            history.ended(sequence, len(text + output), visit, len(text))
            record.ended(talk, text, output)
            assert visit.session.turns == talk.turns
            texts = [*texts[-12:], text + output]
        else:
            base = dice.choice(texts)
            base = base[: dice.randrange(len(base) + 1)] if dice.random() < 0.2 else base
            text = base + "".join(dice.choices("abc", k=dice.randrange(1, 5)))
            name = dice.choice(["", "", "", *"ABCDEF"])
            sequence = prompt(text)
            sequence.session = session_hint(name, b"", dice.choice([None, None, -1.0, 0.0, 40.0]))
            visit = history.arrived(sequence, 0)
            talk, left = record.arrived(text, name)
            assert same.setdefault(talk, visit.session) is visit.session
            assert visit.left is (None if left is None else same[left])
            assert left is not talk or visit.session.use_class == history_module.LEFT
            num_continued += talk.turns > 0 and left is None
            num_left += left is not None
            running.append((text, visit, talk, sequence))
        if dice.random() < 0.2:
            name = dice.choice("ABCDEFGH")
            told, _ = history.tell(session_hint(name, b"", dice.choice([-1.0, 7.0])))
            assert told is (same[record.names[name]] if name in record.names else None)
        assert len(history.sessions) == len(record.ends) <= most
    assert len(set(map(id, same.values()))) == len(same)
    assert num_continued > 20 < num_left


RETURNS = (None, None, -1.0, 0.0, 0.5, 20.0, 1e5, 2_592_000.0)
"""Seconds, most of them wrong."""


@pytest.mark.parametrize("seed", range(16))
def test_random_steps_with_hints_keep_every_invariant_and_leave_no_garbage(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tables are small; times are told while a request runs, after its blocks were evicted, and after a reset. Prompts
    rewrite the ends of others that run, or whose blocks were evicted.
    """
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 12)
    monkeypatch.setattr(sessions, "REWRITTEN_TOKENS", rewritten := seed % 4)
    monkeypatch.setattr(claims, "MOST_TENANTS", 2)
    monkeypatch.setattr(history_module, "REQUESTS_PER_REFRESH", 4)
    dice, now = random.Random(seed), [0.0]
    host, policy = dice.choice([0, 10, 60]), dice.choice(list(WritePolicy))
    config = KVCacheConfig(dice.randrange(12, 40), host, block_size=1, write_policy=policy, lookahead_requests=2)
    cache = CacheManager(config, clock=lambda: now[0])
    history, texts, live, num_known = cache._history, ["q", "abcdef"], dict[str, tuple[str, int]](), 0
    names: dict[str, SessionHint] = {}
    for number in range(400):
        lot, name = dice.random(), dice.choice([*live, ""])
        now[0] += dice.choice([0, 0, 0.001, 0.3, 5, 1000])
        told = session_hint(dice.choice(["", "a", "b", "c", f"x{dice.randrange(30)}"]), dice.choice([b"", b"s", b"t"]))
        told = told._replace(return_in_s=dice.choice(RETURNS))
        if lot < 0.35 and len(live) < 4:
            base = dice.choice(texts)
            told = names.get(base, told) if dice.random() < 0.7 else told
            base = base[: dice.randrange(1, len(base) + 1)] if dice.random() < 0.2 else base
            base = base[: len(base) - dice.randrange(rewritten + 1)] or base
            text = (base + "".join(dice.choices("pqrst", k=dice.randrange(1, 5))))[:16]
            sequence = prompt(text)
            sequence.session = names[text] = told
            cache.match_prefix(str(number), sequence, resumed=dice.random() < 0.1)
            live[str(number)] = text, 0
        elif lot < 0.65 and name:
            text, part = live.pop(name)
            if part == 0 and isinstance(cache.allocate(name, len(text)), NoSpace):
                cache.release(name)
            elif part == 0:
                live[name] = text, 1
            elif part == 1:
                cache.take_swap_step()
                cache.commit(name, dice.choice([len(text), dice.randrange(len(text) + 1)]))
                live[name] = text, 2
            else:
                dice.choice([cache.finish, cache.finish, cache.preempt])(name)
                texts = [*texts[-8:], text]
        elif lot < 0.7:
            cache.take_swap_step()
        elif lot < 0.82:
            told = names[dice.choice(list(names))]._replace(return_in_s=told.return_in_s) if names else told
            num_known += cache.tell_return(told)
        elif lot < 0.86 and name:
            (cache.release if live.pop(name)[1] < 2 else cache.finish)(name)
        elif lot < 0.88:
            with suppress(PoolInUseError):
                cache.resize_device_pool(dice.randrange(12, 40))
        elif lot < 0.89:
            cache.reset_cache(force=(force := dice.random() < 0.3))
            live = {} if force else live
        elif lot < 0.92:
            history.judge.trusts = dice.random() < 0.8
        elif not isinstance(slots := cache.lend(dice.randrange(1, 8)), NoSpace):
            cache.take_back(slots)
        cache.check()
        assert max(len(history.sessions), len(history.sessions._by_name), len(history.sessions._marks)) <= 12
        assert len(history.claims._counts) <= 2
    for name in live:
        cache.finish(name)
    for text in ("uv", "uvw", "uvwx", "vu"):
        run(cache, text)
    assert num_known
    gc.collect()
    gc.disable()
    try:
        table = history.sessions
        owned = [*cache._tree.runs(), *table._by_end.values(), *table._by_name.values()]  # other tests may keep theirs
        before = set(map(id, owned))
        del owned, table
        assert len(before) > 5
        cache.reset_cache()
        cache.take_swap_step()
        cache.check_idle()
        left = [each for each in gc.get_objects() if isinstance(each, Run | Session) and id(each) in before]
    finally:
        gc.enable()
    assert [each for each in left if isinstance(each, Session) or each.cells] == []  # a late copy names an empty run


def test_told_time_that_is_not_believed_makes_no_block_younger(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claims.Claims, "believes", lambda claims, tenant: False)
    cache = manager(4, eviction_policy="adaptive")
    for text in ("ab!", "cd!", "ef!"):
        if text == "ef!":
            assert cache.tell_return(session_hint("ab!", return_in_s=9.0))
        sequence = prompt(text)
        sequence.session = session_hint(text)
        cache.match_prefix(text, sequence)
        cache.allocate(text, 2)
        cache.take_swap_step()
        cache.commit(text, 2)
        cache.finish(text)
    assert cached(cache, "ab") == []
