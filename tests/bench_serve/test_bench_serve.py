"""`bench serve` must notice every difference between two servers, and every request that was not answered."""

import argparse
import json
import zlib
from itertools import pairwise

import pytest

from fastdeploy_kvcache_v1 import bench_serve
from fastdeploy_kvcache_v1.bench_serve.server_process import running_server
from fastdeploy_kvcache_v1.errors import ConfigError, WorkerDiedError


def bench(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    bench_serve.add_arguments(parser)
    return bench_serve.run(parser.parse_args([str(argument) for argument in arguments]))


def seed_of(name):
    return zlib.crc32(name.encode())


def count_up(body):
    return [sum(body["prompt"]) % 97 + place for place in range(body["max_tokens"])]


def test_equal_answers_pass_and_are_reported(trace, start_server, capsys):
    urls = ("--url", start_server(count_up), "--url-off", start_server(count_up))
    assert bench("--trace", trace, *urls, "--requests", 12) == 0
    out, err = capsys.readouterr()
    assert "% of the prompt tokens came from the cache; with it the median first token was " in out
    assert "all tokens of 12 requests are the same with the cache on and off" in out
    assert err == ""
    assert bench("--trace", trace, *urls, "--requests", 5, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["problems"] == []
    assert result["compared"] is True
    for run in result["runs"].values():
        assert (run["answered"], run["failed"]) == (5, 0)
        assert set(run["ttft_ms"]) == {"p50", "p90", "p99"}
        assert 0 < run["cached_share"] < 1


def test_one_different_token_fails(trace, start_server, capsys):
    def wrong(body):
        tokens = count_up(body)
        if body["seed"] == seed_of("trace line 7"):
            tokens[3] += 1
        return tokens

    assert bench("--trace", trace, "--url", start_server(count_up), "--url-off", start_server(wrong)) == 1
    out = capsys.readouterr().out
    assert "trace line 7: tokens differ from output token 3 on" in out
    assert "1 problem\n" in out


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda body: None if body["seed"] == seed_of("trace line 2") else count_up(body), "HTTP 400"),
        (
            lambda body: count_up(body)[:-1] if body["seed"] == seed_of("trace line 2") else count_up(body),
            "tokens instead of",
        ),
    ],
    ids=["refused", "too few tokens"],
)
def test_an_unanswered_request_fails(trace, start_server, capsys, broken, words):
    assert bench("--trace", trace, "--url", start_server(broken)) == 1
    out = capsys.readouterr().out
    assert "cache on, trace line 2: " in out
    assert words in out
    assert "1 problem\n" in out


def test_one_server_alone_is_measured_but_not_compared(trace, start_server, capsys):
    assert bench("--trace", trace, "--url", start_server(count_up)) == 0
    assert "no tokens were compared" in capsys.readouterr().out


def test_requests_follow_the_traces_pace(trace, start_server):
    seen = []
    url = start_server(lambda body: seen.append(body["seed"]) or count_up(body))
    assert bench("--trace", trace, "--url", url, "--speedup", 10, "--concurrency", 1) == 0
    assert seen == [seed_of("warm-up"), *(seed_of(f"trace line {line}") for line in range(1, 13))]


def test_a_conversation_goes_on_from_what_was_answered(start_server):
    prompts = []
    url = start_server(lambda body: prompts.append(body["prompt"]) or count_up(body))
    options = ("--requests", 16, "--concurrency", 1, "--max-prompt-tokens", 200, "--max-output-tokens", 4)
    assert bench("--workload", "chat", "--url", url, *options) == 0
    warm_up, *asked = prompts
    assert len(warm_up) == max(map(len, asked)) <= 200
    assert len(asked) == 16
    for before, after in pairwise(asked):
        if len(after) > len(before):
            answer = [sum(before) % 97 + place for place in range(4)]
            assert after[: len(before) + 4] == before + answer
    assert sum(len(after) > len(before) for before, after in pairwise(asked)) == 14


def test_the_rest_of_a_session_that_failed_is_not_sent(start_server, capsys):
    asked = []
    url = start_server(lambda body: asked.append(body) or (None if len(asked) == 4 else count_up(body)))
    assert bench("--workload", "chat", "--url", url, "--requests", 16, "--concurrency", 1) == 1
    out = capsys.readouterr().out
    assert len(asked) == 1 + 3 + 8
    assert "cache on, chat 0 turn 2: HTTP 400" in out
    assert "cache on, chat 0 turn 7: not sent: the turn before failed" in out
    assert "6 problems" in out


def test_sessions_begin_at_the_rate_asked(start_server, monkeypatch):
    waits = []

    async def no_sleep(seconds):
        waits.append(seconds)

    monkeypatch.setattr("fastdeploy_kvcache_v1.bench_serve.client.asyncio.sleep", no_sleep)
    url = start_server(count_up)
    assert bench("--workload", "documents", "--url", url, "--requests", 8, "--rate", 0.01) == 0
    _, *gaps = waits
    assert len(gaps) == 8
    assert gaps == sorted(gaps)
    assert gaps[-1] > 60, "eight sessions at one in a hundred seconds"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--url-off", "http://127.0.0.1:1"),
        ("--url", "127.0.0.1:8000"),
        ("--url", "http://127.0.0.1:1", "--", "--block-size", "32"),
        ("--requests", "0"),
        ("--concurrency", "0"),
        ("--speedup", "-1"),
        ("--divide", "3"),
        ("--rate", "0"),
        ("--rate", "1", "--speedup", "1"),
        ("--max-output-tokens", "0"),
    ],
)
def test_bad_options_are_one_clear_line(trace, arguments):
    with pytest.raises(ConfigError) as raised:
        bench("--trace", trace, *arguments)
    assert "\n" not in str(raised.value)


def test_a_speedup_needs_a_trace():
    with pytest.raises(ConfigError, match="--speedup needs --trace"):
        bench("--speedup", 2, "--url", "http://127.0.0.1:9")


@pytest.mark.process
def test_a_server_that_cannot_start_says_why():
    with pytest.raises(WorkerDiedError, match="unknown write policy 'never'"), running_server(["--write-policy=never"]):
        pass


@pytest.mark.process
def test_cache_on_and_off_give_the_same_tokens(trace, capsys):
    """The real thing: two servers, one after the other, with a device tier too small for the trace."""
    tiny = ("--num-gpu-blocks-override", "8", "--swap-space", "0.01", "--write-policy", "write_through")
    assert bench("--trace", trace, "--max-output-tokens", 4, "--json", "--", *tiny) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["runs"]["cache on"]["cached_share"] > 0
    assert result["runs"]["cache off"]["cached_share"] == 0
