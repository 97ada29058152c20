"""What a recorded trace says, what it does not say, and what becomes of it when the disk is full."""

import errno
import json
import logging
import os
import random
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.contract.sessions import UNTOLD, session_hint
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.lab.replay.hashes import TraceHasher
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher
from fastdeploy_kvcache_v1.telemetry import trace_recorder
from fastdeploy_kvcache_v1.telemetry.trace_recorder import TraceRecorder
from tests.e2e.server_process import wait_until

BLOCK = 16


def hashed(tokens, session=UNTOLD):
    hasher = BlockHasher(BLOCK, session=session)
    hasher.extend(list(tokens))
    return hasher


@pytest.fixture
def path(tmp_path):
    return tmp_path / "trace.jsonl"


@pytest.fixture
def recorder(path):
    recorder = TraceRecorder(path, BLOCK)
    yield recorder
    recorder.close()


def record(recorder, tokens, *, prompt=None, session=UNTOLD, ticket=None):
    """A request of these tokens, of which the first `prompt` are the prompt's."""
    prompt = len(tokens) if prompt is None else prompt
    ticket = recorder.arrived() if ticket is None else ticket
    recorder.ended(ticket, hashed(tokens, session), prompt)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_recorded_lines_can_be_replayed_and_keep_common_prefixes(recorder, path):
    tokens = list(range(100))
    record(recorder, tokens[:50])
    record(recorder, [*tokens[:40], *range(500, 530)])
    record(recorder, [7, 8, 9])
    recorder.close()
    requests = list(read_trace(path))
    assert [(r.input_length, len(r.hash_ids)) for r in requests] == [(50, 4), (70, 5), (3, 1)]
    assert {request.tokens_per_id for request in requests} == {16}
    first, second, third = (request.hash_ids for request in requests)
    assert first[:2] == second[:2]
    assert len({*first, *second, *third}) == 4 + 5 + 1 - 2
    assert (recorder.num_lines, recorder.num_lost) == (3, 0)


@pytest.mark.parametrize("num_outputs", range(20))
def test_output_blocks_with_kv_are_named_and_match_in_the_next_turn(recorder, path, num_outputs):
    tokens = list(range(200))
    record(recorder, tokens[: 60 + num_outputs], prompt=60)
    record(recorder, tokens[:150])
    recorder.close()
    turn, later = read_trace(path)
    hasher = TraceHasher(BLOCK)
    num_blocks = (60 + max(1, num_outputs) - 1) // BLOCK
    known = hasher.prompt_hashes(turn) + hasher.output_hashes(turn)
    assert hasher.prompt_hashes(later)[:num_blocks] == known[:num_blocks]
    assert len(turn.output_hash_ids) == num_blocks - 3
    assert (turn.input_length, turn.output_length) == (60, num_outputs)


def test_names_tell_nothing_without_the_key(tmp_path):
    """Nobody who guesses the tokens can find them: another recording names the same prompts otherwise."""
    ids = []
    for name in ("one", "two"):
        recorder = TraceRecorder(tmp_path / name, BLOCK)
        record(recorder, range(64), session=session_hint("zoe@example.org"))
        recorder.close()
        assert "zoe" not in (tmp_path / name).read_text()
        (line,) = lines(tmp_path / name)
        assert session_hint("zoe@example.org").name.hex()[:16] != line["session_id"]
        assert set(line) == {"timestamp", "tokens_per_id", "hash_ids", "session_id", "input_length", "output_length"}
        ids.append({*line["hash_ids"], line["session_id"]})
    assert len(ids[0] | ids[1]) == 2 * 5
    plain = {int.from_bytes(block[:8], order) for block in hashed(range(64)).hashes for order in ("big", "little")}
    assert not plain & (ids[0] | ids[1])


def test_only_the_owner_reads_it_and_no_file_is_overwritten(tmp_path):
    names = []
    for _ in range(3):
        recorder = TraceRecorder(tmp_path / "trace.jsonl", BLOCK)
        record(recorder, range(20))
        recorder.close()
        names.append(recorder.path.name)
        assert stat.S_IMODE(recorder.path.stat().st_mode) == 0o600
        assert len(lines(recorder.path)) == 1
    assert names == ["trace.jsonl", "trace.jsonl.1", "trace.jsonl.2"]


def test_a_place_that_cannot_be_written_to_is_one_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot record a trace in .*missing/trace.jsonl: No such file or directory"):
        TraceRecorder(tmp_path / "missing" / "trace.jsonl", BLOCK)


def test_lines_stand_in_the_order_of_arrival(recorder, path):
    tickets = [recorder.arrived() for _ in range(50)]
    order = list(range(50))
    random.Random(5).shuffle(order)
    for number in order:
        if number % 7 == 3:
            recorder.left(tickets[number])
        else:
            record(recorder, [number] * (number + 1), ticket=tickets[number])
    recorder.close()
    assert [line["input_length"] - 1 for line in lines(path)] == [number for number in range(50) if number % 7 != 3]


def test_request_that_never_ended_does_not_delay_lines_at_the_end(recorder, path):
    recorder.arrived()
    record(recorder, range(20))
    recorder.close()
    assert len(lines(path)) == 1


def test_the_oldest_is_not_waited_for_without_end(recorder, path, monkeypatch):
    monkeypatch.setattr(trace_recorder, "MOST_KEPT_BLOCKS", 40)
    slow = recorder.arrived()
    for number in range(30):
        record(recorder, [number] * 32)
        wait_until(lambda least=number - 9: recorder.num_lines >= least, f"{number - 9} lines")
    record(recorder, [99] * 32, ticket=slow)
    recorder.close()
    assert recorder.num_lost == 0
    firsts = [line["hash_ids"][0] for line in lines(path)]
    assert len(set(firsts)) == 31


class SlowDisk:
    """Stands in for `os.write`: waits, writes in small pieces, and is full after so many bytes."""

    def __init__(self, monkeypatch, *, room=10**9, piece=7, closed=False):
        self._write, self.room, self._piece = os.write, room, piece
        self.open = threading.Event()
        if not closed:
            self.open.set()
        monkeypatch.setattr(trace_recorder.os, "write", self)

    def __call__(self, descriptor, data):
        assert self.open.wait(60)
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, bytes(data[: min(self._piece, self.room)]))
        self.room -= written
        return written


def test_a_disk_that_hangs_costs_lines_and_never_a_caller(recorder, path, monkeypatch):
    monkeypatch.setattr(trace_recorder, "MOST_KEPT_BLOCKS", 20)
    disk = SlowDisk(monkeypatch, closed=True)
    for number in range(100):
        record(recorder, [number] * 32)
    assert recorder.num_lost == 90
    disk.open.set()
    recorder.close()
    assert (recorder.num_lines, len(lines(path))) == (10, 10)


def test_a_full_disk_ends_the_recording_with_one_line_and_whole_lines(recorder, path, monkeypatch, caplog):
    SlowDisk(monkeypatch, room=1_000)
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            record(recorder, [number] * 32)
        recorder.close()
        for number in range(3):
            record(recorder, [number] * 32)
    kept = lines(path)
    assert 5 < len(kept) == recorder.num_lines < 20
    assert recorder.num_lines + recorder.num_lost == 103
    (logged,) = caplog.messages
    assert logged == f"No space left on device: the trace {path} ends here, after {len(kept)} requests"


def test_a_bug_costs_the_trace_and_nothing_else(recorder, path, monkeypatch, caplog):
    monkeypatch.setattr(recorder, "_line", lambda item, hashes: 1 / 0)
    for number in range(10):
        record(recorder, [number] * 32)
    recorder.close()
    assert (recorder.num_lines, recorder.num_lost, path.read_text()) == (0, 10, "")
    assert "ZeroDivisionError" in caplog.text


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now=1_000.0)
    monkeypatch.setattr(trace_recorder.time, "monotonic", lambda: clock.now)
    return clock


def test_turns_of_a_user_follow_each_other_unless_they_overlap(clock, recorder, path):
    def ask(begin, end, user):
        clock.now = 1_000 + begin
        ticket = recorder.arrived()
        clock.now = 1_000 + end
        record(recorder, range(40), session=session_hint(user), ticket=ticket)

    ask(1, 3, "a")
    ask(3.5, 4, "b")
    ask(4, 9, "a")
    ask(7.5, 10, "a")  # in another window
    ask(11.25, 12, "a")
    ask(12, 13, None)
    ask(11.5, 14, "a")  # the answer was there before the end
    recorder.close()
    found = [(line["timestamp"], line.get("session_id"), line.get("delay")) for line in lines(path)]
    names = [name for _, name, _ in found]
    assert [time for time, _, _ in found] == [1_000, 3_500, 4_000, 7_500, 11_250, 12_000, 11_500]
    assert [delay for _, _, delay in found] == [None, None, 1_000, None, 2_250, None, 0]
    assert names[0] == names[2] == names[4] != names[1]
    assert names[3] is names[5] is None
    assert [request.after for request in read_trace(path)] == [None, None, 1, None, 3, None, 5]


def test_sessions_are_told_apart_by_salt_and_told_times_are_kept(recorder, path):
    told = [("a", b"", 2.5), ("a", b"s", 0.0), ("a", b"", -1.0), (None, b"", 30.0), ("a", b"", None)]
    for name, salt, seconds in told:
        record(recorder, range(20), session=session_hint(name, salt, seconds))
    recorder.close()
    found = [(line.get("session_id"), line.get("return_in_s")) for line in lines(path)]
    assert [seconds for _, seconds in found] == [seconds for *_, seconds in told]
    first, salted, again, unnamed, last = (name for name, _ in found)
    assert first == again == last != salted
    assert unnamed is None


def test_tool_calls_at_the_end_of_answers_are_kept(recorder, path):
    for calls_tool in (True, False):
        record(recorder, range(20), session=UNTOLD._replace(calls_tool=calls_tool))
    recorder.close()
    assert [request.tool_call for request in read_trace(path)] == [True, False]
    assert "tool_call" not in lines(path)[1]


def test_an_age_moves_a_request_back(clock, recorder, path):
    clock.now += 5
    record(recorder, range(20), ticket=recorder.arrived(age_s=1.5))
    record(recorder, range(20), ticket=recorder.arrived(age_s=60))
    recorder.close()
    assert [line["timestamp"] for line in lines(path)] == [3_500, 0]


def test_many_threads_lose_nothing(recorder, path):
    def ask(number):
        for _ in range(50):
            record(recorder, [number] * 20)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(8)))
    recorder.close()
    times = [line["timestamp"] for line in lines(path)]
    assert (recorder.num_lines, recorder.num_lost, len(times)) == (400, 0, 400)
    assert all(later >= earlier - 1_000 for earlier, later in pairwise(times))
