"""What the generated workloads share, how long they are, and when their sessions begin."""

from itertools import pairwise
from statistics import mean

import pytest

from fastdeploy_kvcache_v1.bench_serve.session import Session, longest_prompt, num_requests, poisson
from fastdeploy_kvcache_v1.bench_serve.workloads import AGENT_STEPS, CHAT_TURNS, QUESTIONS, WORKLOADS, Size
from fastdeploy_kvcache_v1.errors import ConfigError

SIZE = Size(requests=30, max_prompt_tokens=500, max_output_tokens=8)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_as_large_as_asked_and_the_same_for_the_same_seed(name):
    make = WORKLOADS[name]
    sessions = make(SIZE)
    assert 30 <= num_requests(sessions) < 30 + max(QUESTIONS, CHAT_TURNS, AGENT_STEPS)
    assert 490 < longest_prompt(sessions) <= 500
    assert len({session.name for session in sessions}) == len(sessions)
    assert make(SIZE) == sessions
    assert make(Size(30, 500, 8, seed=1)) != sessions


def common_prefix(left, right):
    return next((place for place, pair in enumerate(zip(left, right, strict=False)) if len(set(pair)) == 2), len(left))


def test_questions_share_their_document_and_nothing_else():
    by_document = {}
    for session in WORKLOADS["documents"](SIZE):
        (turn,) = session.turns
        by_document.setdefault(session.name.split()[1], []).append(turn.tokens)
    assert {len(asked) for asked in by_document.values()} == {QUESTIONS}
    assert all(common_prefix(asked[0], asked[1]) >= 476 for asked in by_document.values())
    first, second, *_ = (asked[0] for asked in by_document.values())
    assert common_prefix(first, second) < 16


@pytest.mark.parametrize(("name", "shared", "turns"), [("chat", 50, CHAT_TURNS), ("agents", 250, AGENT_STEPS)])
def test_conversations_share_their_first_tokens(name, shared, turns):
    first, second, *_ = WORKLOADS[name](SIZE)
    assert len(first.turns) == turns
    assert shared <= common_prefix(first.turns[0].tokens, second.turns[0].tokens) < shared + 16
    assert first.turns[1].tokens != second.turns[1].tokens


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_prompt_too_short_for_the_workload_is_refused(name):
    with pytest.raises(ConfigError, match="--max-prompt-tokens 20 with --max-output-tokens 8 leaves no room"):
        WORKLOADS[name](Size(30, 20, 8))


def test_poisson_arrivals_have_the_rate_they_should_have():
    sessions = poisson([Session(str(number), ()) for number in range(4000)], rate=5.0, seed=1)
    gaps = [after.start_s - before.start_s for before, after in pairwise(sessions)]
    assert sessions[0].start_s == 0
    assert 0.19 < mean(gaps) < 0.21
    assert 0.6 < sum(gap < mean(gaps) for gap in gaps) / len(gaps) < 0.66, "1 - 1/e of them are shorter"
