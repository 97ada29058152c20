"""A trace that the real server records, replayed: the same hits as its answers say."""

import json

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.replay.trace import read_trace
from fastdeploy_kvcache_v1.trace_recorder import VARIABLE

from .cpu_server import BLOCK_SIZE, FLAGS, started, wait_until
from .fastdeploy_trees import RELEASES, tree
from .server_workload import noise

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(600)]

DEVICE_BLOCKS = 200

CACHES_OUTPUTS = ("2.5",)
"""Releases whose default it is."""


@pytest.mark.parametrize("release", RELEASES)
def test_a_replay_hits_what_the_server_hit(release, tmp_path):
    tree(release)  # or skip
    path = tmp_path / "trace.jsonl"
    flags, environment = [*FLAGS, "--num-gpu-blocks-override", str(DEVICE_BLOCKS)], {}
    if release == RELEASES[0]:
        environment[VARIABLE] = str(path)
    else:  # `serve` makes a variable of its flag
        flags += ["--record-trace", str(path)]
    with started(release, tmp_path / "server", *flags, environment=environment) as server:
        cached = []
        with server.client() as client:
            talks = {name: [{"role": "system", "content": noise(1, 150)}] for name in ("ada", "bob")}
            for turn in range(6):
                name = ("ada", "bob", "ada")[turn % 3]
                talks[name].append({"role": "user", "content": f"{turn} {noise(turn, 60)}"})
                answer = server.ask(client, talks[name], user=name)
                talks[name].append({"role": "assistant", "content": answer.text})
                cached.append(answer.cached_tokens)
                # The answer comes before its last block is cached.
                wait_until(lambda: server.metrics()["trace_lines_total"] == len(cached), "the line")
        assert server.metrics()["trace_lost_lines_total"] == 0
        assert server.stop() == 0, server.stderr
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["output_length"] for line in lines] == [12] * 6
    assert [line["timestamp"] for line in lines] == sorted(line["timestamp"] for line in lines)
    assert [request.after for request in read_trace(path)] == [None, None, 1, 3, 2, 4]
    config = KVCacheConfig(DEVICE_BLOCKS, 0, BLOCK_SIZE, max_queued_events=0)
    replay = Replay(ReplayOptions(config, window=1, admissions_per_step=1, outputs=release in CACHES_OUTPUTS))
    replay.run(read_trace(path))
    assert replay.num_device_hit_tokens == sum(cached) > 6 * BLOCK_SIZE
