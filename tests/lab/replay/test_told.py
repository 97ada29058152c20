"""What the manager of a replay is told: names of sessions, times of return, and the time of the trace."""

from itertools import pairwise

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.sessions import session_hint
from fastdeploy_kvcache_v1.lab.replay.closed_loop import ClosedLoop
from fastdeploy_kvcache_v1.lab.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.told import as_told, inferred
from fastdeploy_kvcache_v1.lab.replay.trace import TraceRequest, read_trace

from .conftest import traffic
from .test_trace import GOOD, write

CONFIG = KVCacheConfig(1_000, max_queued_events=0)


def request(line: int, at_s: float, *ids: int, session: str | None = None, **more) -> TraceRequest:
    return TraceRequest(
        line=line,
        timestamp_ms=1000 * at_s,
        input_length=64 * len(ids),
        output_length=10,
        hash_ids=ids,
        tokens_per_id=64,
        session=session,
        **more,
    )


THREE_TURNS_AND_ONE = [
    request(1, 5, 1, session="a"),
    request(2, 6, 2, session="b", return_in_s=7.0),
    request(3, 15, 1, 3, session="a"),
    request(4, 15.5, 1, 3, 4, session="a"),
]


@pytest.mark.parametrize(
    ("told", "returns"),
    [
        ("trace", [None, 7, None, None]),
        ("unnamed", [None, None, None, None]),
        ("none", [None, None, None, None]),
        ("last", [None, -1, None, -1]),
        ("all", [10, -1, 0.5, -1]),
        ("lies", [-1, 1, -1, 1]),
    ],
)
def test_each_name_tells_so_much_of_sessions_and_returns(told, returns):
    requests = as_told(THREE_TURNS_AND_ONE, ReplayOptions(CONFIG, told=told))
    assert [each.return_in_s for each in requests] == returns
    names = [None] * 4 if told == "unnamed" else ["a", "b", "a", "a"]
    assert [each.session for each in requests] == names
    assert [each.line for each in requests] == [1, 2, 3, 4]


def test_an_error_multiplies_or_divides_each_time_and_no_last_turn(synthetic_trace):
    requests = read_trace(synthetic_trace)
    right, wrong = (as_told(requests, ReplayOptions(CONFIG, told="all", told_error=error)) for error in (1, 10))
    ratios = [b.return_in_s / a.return_in_s for a, b in zip(right, wrong, strict=True) if a.return_in_s]
    assert {round(ratio, 6) for ratio in ratios} == {0.1, 1, 10}
    assert [each.return_in_s == -1 for each in right] == [each.return_in_s == -1 for each in wrong]


class Spy:
    """Notes per line the time and the told return, when it is admitted and when it ends."""

    def __init__(self, replay: Replay) -> None:
        self.admitted: dict[int, tuple[float, float | None]] = {}
        self.ended: dict[int, tuple[float, float | None]] = {}
        self.sessions = {}
        match, finish = replay.manager.match_prefix, replay.manager.finish

        def noted_match(request_id, sequence):
            line = int(request_id.removeprefix("line-"))
            self.sessions[line] = sequence
            self.admitted[line] = (replay.clock(), sequence.session.return_in_s)
            return match(request_id, sequence)

        def noted_finish(request_id):
            line = int(request_id.removeprefix("line-"))
            self.ended[line] = (replay.clock(), self.sessions[line].session.return_in_s)
            finish(request_id)

        replay.manager.match_prefix, replay.manager.finish = noted_match, noted_finish


def spied(replay: Replay, requests) -> Spy:
    spy = Spy(replay)
    replay.run(iter(as_told(requests, replay.options)))
    return spy


def test_an_open_loop_has_the_time_of_the_last_admission():
    requests = [request(1, 1, 1), request(2, 4, 2), request(3, 3, 3), request(4, 9, 4)]
    spy = spied(Replay(ReplayOptions(CONFIG, window=2, admissions_per_step=1)), requests)
    assert [spy.admitted[line][0] for line in (1, 2, 3, 4)] == [1, 4, 4, 9]
    assert [spy.ended[line][0] for line in (1, 2, 3, 4)] == [4, 4, 9, 9]


def test_a_request_that_ends_late_is_told_the_time_that_is_left():
    options = ReplayOptions(CONFIG, window=2, admissions_per_step=1, told="all")
    spy = spied(Replay(options), THREE_TURNS_AND_ONE)
    assert [spy.admitted[line] for line in (1, 2, 3, 4)] == [(5, 10), (6, -1), (15, 0.5), (15.5, -1)]
    assert [spy.ended[line] for line in (1, 2, 3, 4)] == [(6, 9), (15, -1), (15.5, 0), (15.5, -1)]


def test_a_closed_loop_tells_when_the_next_turn_really_comes(tmp_path):
    requests = read_trace(traffic(tmp_path / "trace", "chat", 200))
    options = ReplayOptions(KVCacheConfig(60_000, max_queued_events=0), 500, closed_loop=True, told="all")
    spy = spied(ClosedLoop(options), requests)
    turns = [each for each in requests if each.after is not None]
    assert len(turns) > 50
    for turn in turns:
        ended_s, told_s = spy.ended[turn.after]
        assert abs(spy.admitted[turn.line][0] - ended_s - told_s) <= options.step_ms / 1000
    assert [told for _, told in spy.ended.values()].count(-1) == 200 - len(turns)


def test_the_manager_knows_sessions_by_name():
    spy = spied(Replay(ReplayOptions(CONFIG)), THREE_TURNS_AND_ONE)
    assert spy.sessions[3].session == session_hint("a")
    assert spy.sessions[2].session.name == session_hint("b").name


def test_sessions_and_chats_have_the_name_of_their_first_line(tmp_path):
    chats = [{"chat_id": 7, "parent_chat_id": -1}, {"chat_id": 8, "parent_chat_id": 7}, {"chat_id": 9}]
    tells = {"session_id": 4, "return_in_s": 2}
    requests = read_trace(write(tmp_path, *({**GOOD, **fields} for fields in (*chats, tells, {}))))
    assert [each.session for each in requests] == ["7", "7", "9", "4", None]
    assert [each.return_in_s for each in requests] == [None, None, None, 2, None]


def test_a_prompt_that_extends_the_last_one_of_a_session_belongs_to_it():
    system = range(100, 103)
    prompts = [(*system, 1), (*system, 2), (*system, 1, 3), (*system, 4), (*system, 2, 5, 6), (*system, 7), (8,)]
    names = inferred([request(line, line, *ids) for line, ids in enumerate(prompts)])
    assert [names.index(name) for name in names] == [0, 1, 0, 3, 1, 5, 6]


def test_inferred_sessions_of_the_generator_are_those_that_it_names(tmp_path):
    requests = read_trace(traffic(tmp_path / "trace", "agents", 1_000))
    names = inferred(requests)
    of_session = {}
    for each, name in zip(requests, names, strict=True):
        of_session.setdefault(each.session, []).append(name)
    turns = [pair for found in of_session.values() for pair in pairwise(found)]
    assert sum(before == after for before, after in turns) > 0.99 * len(turns)
    assert 0.9 * len(of_session) < len(set(names)) <= len(of_session)


def test_conversations_of_the_real_trace_are_found(real_trace):
    assert len(set(inferred(read_trace(real_trace)))) == 7_437
