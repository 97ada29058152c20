"""What each kind of traffic promises about who repeats what, and when."""

import hashlib
import json
import subprocess
import sys
from collections import Counter, defaultdict
from itertools import islice, pairwise

import pytest

from fastdeploy_kvcache_v1.cli import main
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.replay.closed_loop import ClosedLoop
from fastdeploy_kvcache_v1.lab.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
from fastdeploy_kvcache_v1.lab.traffic import KINDS, Source
from tests.lab.replay.conftest import follow_one_prefix_each

COUNT = 600
WITH_SESSIONS = ("chat", "agents", "batch")


def lines_of(name, count=COUNT, seed=1, **shape):
    kind = KINDS[name]
    return list(islice(kind.lines(Source(seed), kind.shape if not shape else kind.shape.__class__(**shape)), count))


def repeated(lines):
    """Ids seen before, over all."""
    seen, number = set(), 0
    for line in lines:
        number += len(seen.intersection(line["hash_ids"]))
        seen.update(line["hash_ids"])
    return number / sum(len(line["hash_ids"]) for line in lines)


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    folder = tmp_path_factory.mktemp("traffic")
    for name in KINDS:
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines_of(name)))
    return folder


@pytest.mark.parametrize("name", list(KINDS))
def test_a_kind_writes_what_replay_reads_in_the_order_of_arrival(traces, name):
    requests = list(read_trace(traces / f"{name}.jsonl"))
    assert len(requests) == COUNT
    assert {request.tokens_per_id for request in requests} == {64}
    times = [request.timestamp_ms for request in requests]
    assert times == sorted(times)
    seconds = times[-1] / 1000
    assert 0.5 < COUNT / KINDS[name].shape.rate / seconds < 2
    assert any(request.after for request in requests) == (name in (*WITH_SESSIONS, "sessions"))


DIGESTS = {
    "scan": "7f40f0d84b563476",
    "loop": "dd03c0d90d40ca25",
    "hot": "e71128358b71b44d",
    "chat": "e008ef4cfe4979ea",
    "agents": "e39290f26e950652",
    "sessions": "fcad6bd51ef17438",
    "shifting": "ff7a711ed9ab1366",
    "batch": "00df60ed8af4f4f7",
}
"""Of 1,500 lines."""


@pytest.mark.parametrize("name", list(KINDS))
def test_seed_7_makes_the_traffic_of_the_docs_and_other_seeds_do_not(name):
    text = json.dumps(lines_of(name, 1_500, seed=7))
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == DIGESTS[name]
    assert lines_of(name, 50) != lines_of(name, 50, seed=2)


@pytest.mark.parametrize("name", list(KINDS))
def test_an_id_always_follows_the_same_prefix(traces, name):
    replay = Replay(ReplayOptions(KVCacheConfig(20_000, max_queued_events=0), window=1, outputs=True, verify=True))
    requests = read_trace(traces / f"{name}.jsonl")
    replay.run(requests)
    assert follow_one_prefix_each(requests)


def test_of_a_scan_nothing_can_be_hit():
    lines = lines_of("scan")
    assert repeated(lines) == 0
    assert 3_000 < sum(line["input_length"] for line in lines) / COUNT < 7_000


def test_a_loop_comes_back_when_all_others_have_been_asked():
    lines = lines_of("loop", rate=1, tokens=2_000, items=50)
    for line, again in zip(lines, lines[50:], strict=False):
        shared = set(line["hash_ids"]) & set(again["hash_ids"])
        assert len(shared) >= len(line["hash_ids"]) - 10
        assert len(shared) < len(line["hash_ids"])
    for start in range(0, COUNT - 50, 50):
        assert repeated(lines[start : start + 50]) == 0


def test_hot_requests_share_the_system_prompt_and_nothing_else():
    lines = lines_of("hot")
    whole = KINDS["hot"].shape.tokens // 64
    first = lines[0]["hash_ids"]
    assert all(line["hash_ids"][:whole] == first[:whole] for line in lines)
    rest = [each for line in lines for each in line["hash_ids"][whole:]]
    assert len(rest) == len(set(rest))
    assert 0.85 < repeated(lines) < 0.95


@pytest.mark.parametrize("name", WITH_SESSIONS)
def test_a_turn_holds_all_before_it_and_comes_after_a_pause(name):
    sessions = defaultdict(list)
    for line in lines_of(name, 1_500):
        if "session_id" in line:
            sessions[line["session_id"]].append(line)
    longer = [turns for turns in sessions.values() if len(turns) > 1]
    assert len(longer) > 30
    for turns in sessions.values():
        assert "delay" not in turns[0]
        for before, turn in pairwise(turns):
            known = before["hash_ids"][: before["input_length"] // 64] + before["output_hash_ids"]
            assert len(known) == (before["input_length"] + before["output_length"]) // 64
            assert turn["hash_ids"][: len(known)] == known
            assert turn["input_length"] > before["input_length"] + before["output_length"]
            assert abs(turn["timestamp"] - before["timestamp"] - 30 * before["output_length"] - turn["delay"]) <= 1


@pytest.fixture(scope="module")
def agent_sessions():
    """Lines by session, of 10,000 requests; those of subagents have names with a dot."""
    found = defaultdict(list)
    for line in lines_of("sessions", 10_000, rate=1, tokens=10_000, items=5):
        found[str(line["session_id"])].append(line)
    return found


def test_agent_sessions_have_the_lengths_and_subagents_of_the_description(agent_sessions):
    begun = [name for name, turns in agent_sessions.items() if "delay" not in turns[0] and "." not in name]
    early = [name for name in begun if agent_sessions[name][0]["timestamp"] < 4_000_000]
    turns = sorted(len(agent_sessions[name]) for name in early)
    assert len(turns) > 40
    assert 30 < turns[len(turns) // 2] < 60
    assert 0.1 < turns.count(1) / len(turns) < 0.3
    senders = {name.split(".")[0] for name in agent_sessions if "." in name}
    assert 0.34 < len(senders.intersection(early)) / len(early) < 0.54
    assert all(len(agent_sessions[name]) > 1 for name in senders.intersection(early))


def test_agent_turns_come_seconds_or_minutes_after_the_one_before(agent_sessions):
    alone = [turns for name, turns in agent_sessions.items() if f"{name}.1" not in agent_sessions]
    delays = sorted(line["delay"] for turns in alone for line in turns if "delay" in line)
    assert 2_000 < delays[len(delays) // 2] < 5_000
    assert 0.05 < sum(delay > 60_000 for delay in delays) / len(delays) < 0.1


def test_a_tool_call_at_an_answers_end_is_followed_within_seconds(agent_sessions):
    delays = {True: [], False: []}
    for name, turns in agent_sessions.items():
        if f"{name}.1" not in agent_sessions:
            for before, turn in pairwise(turns):
                delays["tool_call" in before].append(turn["delay"])
    assert {calls: sorted(each)[len(each) // 2] // 1_000 for calls, each in delays.items()}[True] < 5
    assert sorted(delays[False])[len(delays[False]) // 2] > 100_000
    assert 0.05 < len(delays[False]) / len(delays[True]) < 0.12


def test_a_session_waits_while_its_subagent_works(agent_sessions):
    subagents = {name: turns for name, turns in agent_sessions.items() if "." in name}
    assert len(subagents) > 100
    for name, turns in subagents.items():
        times = [line["timestamp"] for line in agent_sessions.get(name.split(".")[0], ())]
        assert not any(turns[0]["timestamp"] < time < turns[-1]["timestamp"] for time in times)


def test_an_agents_turn_repeats_all_before_it_or_sums_up_what_is_too_long(agent_sessions):
    num_summed_up = 0
    for turns in agent_sessions.values():
        for before, turn in pairwise(turns):
            known = before["hash_ids"][: before["input_length"] // 64] + before["output_hash_ids"]
            if turn["hash_ids"][: len(known)] != known:
                assert before["input_length"] > 80_000 > 40_000 > turn["input_length"]
                assert turn["hash_ids"][:20] == known[:20], "the instructions"
                num_summed_up += 1
    assert num_summed_up > 10
    assert len({turns[0]["hash_ids"][0] for turns in agent_sessions.values()}) <= 2 * KINDS["sessions"].shape.items


def test_what_is_popular_changes():
    lines = lines_of("shifting", 3_000, rate=5, tokens=500, items=300)
    periods = [[line["hash_ids"][0] for line in lines if line["timestamp"] // 300_000 == number] for number in (0, 1)]
    tops = [{first for first, _ in Counter(period).most_common(10)} for period in periods]
    assert len(tops[0] & tops[1]) <= 2
    for period, top in zip(periods, tops, strict=True):
        assert len(period) > 1_000
        assert sum(first in top for first in period) > 0.35 * len(period)


def test_jobs_send_new_documents_beside_chat():
    lines = lines_of("batch", 3_000)
    jobs = [line for line in lines if "session_id" not in line]
    assert 0.35 < len(jobs) / len(lines) < 0.65
    instruction = 300 // 64
    assert len({tuple(line["hash_ids"][:instruction]) for line in jobs}) <= KINDS["batch"].shape.items
    documents = [each for line in jobs for each in line["hash_ids"][instruction:]]
    assert len(documents) == len(set(documents))
    gaps = [after["timestamp"] - before["timestamp"] for before, after in pairwise(jobs)]
    assert sum(gap > 20_000 for gap in gaps) >= len(jobs) // 200 - 1


def test_a_closed_loop_of_chat_hits_the_answers(traces):
    """The answers are named, so with outputs cached and room for all only what is new is computed."""
    found = {}
    for outputs in (False, True):
        config = KVCacheConfig(60_000, max_queued_events=0)
        replay = ClosedLoop(ReplayOptions(config, closed_loop=True, outputs=outputs, window=256))
        replay.run(read_trace(traces / "chat.jsonl"))
        found[outputs] = replay.num_device_hit_tokens
    answers = sum(
        max(0, (request.input_length + request.output_length - 1) // 64 - request.num_full_ids) * 64
        for request in read_trace(traces / "chat.jsonl")
    )
    assert found[False] + 0.2 * answers < found[True] < found[False] + answers


def run(capsys, *words):
    status = main(["traffic", *words])
    return status, capsys.readouterr()


def test_the_command_writes_so_many_lines(capsys):
    status, printed = run(capsys, "loop", "--requests", "7", "--seed", "3", "--tokens", "640", "--items", "2")
    lines = [json.loads(line) for line in printed.out.splitlines()]
    assert (status, len(lines), printed.err) == (0, 7, "")
    assert run(capsys, "scan", "--requests", "1", "--rate", "0.5", "--tokens", "1", "--items", "1")[0] == 0
    assert lines == lines_of("loop", 7, seed=3, rate=KINDS["loop"].shape.rate, tokens=640, items=2)


@pytest.mark.process
def test_reader_that_has_enough_ends_it_without_a_word():
    command = [sys.executable, "-m", "fastdeploy_kvcache_v1.cli", "traffic", "scan", "--requests", "100000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert json.loads(process.stdout.readline())["hash_ids"]
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 141


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (("--requests", "0"), "--requests must be at least 1, got 0"),
        (("--rate", "0"), "--rate must be more than 0, got 0.0"),
        (("--rate", "inf"), "--rate must be more than 0, got inf"),
        (("--rate", "nan"), "--rate must be more than 0, got nan"),
        (("--tokens", "0"), "--tokens must be at least 1, got 0"),
        (("--items", "-1"), "--items must be at least 1, got -1"),
    ],
)
def test_wrong_values_are_one_line(capsys, words, error):
    status, printed = run(capsys, "chat", *words)
    assert status == 2
    assert error in printed.err
    assert printed.err.count("\n") == 1


def test_every_kind_stands_in_the_help(capsys):
    with pytest.raises(SystemExit):
        main(["traffic", "--help"])
    said = capsys.readouterr().out
    assert [line.split()[0] for line in said.split("kinds:\n")[1].splitlines()] == list(KINDS)
    assert "(10000)" in said
