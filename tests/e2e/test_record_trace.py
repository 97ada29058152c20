"""A trace that a real server records, replayed: the same hits as the server's own counters say."""

import json
import random

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
from tests.e2e.server_process import refusal, started, wait_until

pytestmark = pytest.mark.process

SIZE = ("--block-size", "16", "--num-gpu-blocks-override", "70", "--max-model-len", "900", "--swap-space", "0.003")
POLICY = "write_back"


class Asker:
    """Conversations that take turns behind one system prompt; both tiers are too small for all of them."""

    def __init__(self, client, seed):
        self._client, self._random = client, random.Random(seed)
        self._system = self._tokens(50)
        self._talks = {}

    def _tokens(self, count):
        return [1 + self._random.randrange(250) for _ in range(count)]

    def ask(self, user, *, outputs=20):
        """The next turn of `user`; returns the cached tokens that the server reports."""
        prompt = self._talks.get(user, self._system) + self._tokens(self._random.randint(1, 100))
        answer = self._client.completions.create(
            model="default",
            prompt=prompt,
            max_tokens=outputs,
            temperature=0,
            user=user,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        self._talks[user] = prompt + list(answer.choices[0].token_ids)
        return answer.usage.prompt_tokens_details.cached_tokens


def replayed(trace, metrics, policy=POLICY):
    config = KVCacheConfig(
        int(metrics["device_blocks"]), int(metrics["host_blocks"]), 16, write_policy=policy, max_queued_events=0
    )
    replay = Replay(ReplayOptions(config, window=1, admissions_per_step=1, outputs=True, verify=True))
    replay.run(read_trace(trace))
    return replay


def test_a_replay_hits_what_the_server_hit(tmp_path):
    trace = tmp_path / "trace.jsonl"
    flags = (*SIZE, "--write-policy", POLICY, "--record-trace", str(trace))
    with started(tmp_path / "server", *flags) as server:
        with server.client() as client:
            asker, rng = Asker(client, seed=3), random.Random(4)
            cached = [asker.ask(f"user-{rng.randrange(6)}", outputs=rng.randint(1, 30)) for _ in range(40)]
        wait_until(lambda: server.metrics()["trace_lines_total"] == 40, "the last line")
        metrics = server.metrics()
        assert metrics["trace_lost_lines_total"] == 0
        assert server.stop() == 0, server.stderr
    requests = list(read_trace(trace))
    assert [request.output_length for request in requests] == [
        json.loads(line)["output_length"] for line in trace.read_text().splitlines()
    ]
    assert "user" not in trace.read_text()
    assert sum(request.after is None for request in requests) == 6
    assert all(request.delay_ms >= 0 for request in requests if request.after is not None)
    found = replayed(trace, metrics)
    hits = (metrics["device_hit_tokens_total"], metrics["host_hit_tokens_total"])
    assert (found.num_device_hit_tokens, found.num_host_hit_tokens) == hits
    assert found.num_device_hit_tokens + found.num_host_hit_tokens == sum(cached)
    assert found.num_input_tokens == metrics["query_tokens_total"]
    assert min(hits) > 100
    assert metrics["device_evicted_blocks_total"] > 20


def test_a_file_that_cannot_be_made_ends_the_start(tmp_path, capsys):
    assert "cannot record a trace in" in refusal(capsys, *SIZE, "--record-trace", str(tmp_path / "no" / "trace"))
