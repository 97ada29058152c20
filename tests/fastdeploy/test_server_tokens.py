"""Whatever the cache does, the real server's tokens are those of FastDeploy without a prefix cache.

What FastDeploy's own layers make of latent vectors behind a prefix is proved in inside/latent_prefix.py.
"""

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from fastdeploy_kvcache_v1.config import GIB

from .cpu_server import BLOCK_SIZE, ask, started, user, wait_until
from .models import LATENT, PLAIN
from .server_workload import NUM_CONVERSATIONS, NUM_DOCUMENTS, TURNS, Workload, document, expected_of, noise

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(900)]

HOST_TIER = ("--swap-space", "0.02")
MANY_PREFILLS = ("--max-num-partial-prefills", "4", "--max-long-partial-prefills", "4")  # prompts fetched at once
THROUGH, TWO = ("--write-policy", "write_through"), ("--tensor-parallel-size", "2")


def test_the_workload_says_something(expected):
    answers = expected.answers
    assert len({answers[f"document {index} round 0"].tokens for index in range(NUM_DOCUMENTS)}) == NUM_DOCUMENTS
    assert len({answers[f"seed {seed}"].tokens for seed in range(3)}) == 3
    assert len(answers["minimum"].tokens) == 40
    assert answers["stop"].finish_reason == "stop"
    assert len(answers["stop"].tokens) < len(answers["no stop"].tokens)


SERVERS = {
    # what says what is copied when: model, device blocks, flags. The default is `auto` and `adaptive`.
    "write_through": (PLAIN, 16, THROUGH),
    "write_back": (PLAIN, 16, ("--write-policy", "write_back")),
    "enough": (PLAIN, 64, THROUGH),
    "selective": (PLAIN, 16, ("--write-through-threshold", "1")),
    "default": (PLAIN, 16, ()),
    "two ranks": (PLAIN, 16, (*THROUGH, *TWO)),
    "latent": (LATENT, 16, THROUGH),
    "latent, two ranks": (LATENT, 16, TWO),
    "latent, stored": (LATENT, 16, ("--kvcache-storage-backend", "file", "--storage-prefetch", "wait_complete")),
}


class Hinted(Workload):
    """Each request names a session, and it and others say when a session returns, all at random."""

    def __init__(self, client, server):
        super().__init__(client)
        self._server, self._rng, self.num_told = server, random.Random(1), 0

    def _draw(self, names):
        rng = self._rng
        return {rng.choice(names): f"s{rng.randrange(9)}", "return_in_s": rng.choice([-1, 0, 0.5, 3600, 2_592_000])}

    def send(self, said, **options):
        if self._rng.random() < 0.5:
            answer = self._server.control("cache/session", **self._draw(["session_id"]))
            self.num_told += answer.keys() == {"known"}
        hint = self._draw(["session_id", "prompt_cache_key", "user", "X-Session-ID"])
        extra = {name: value for name, value in hint.items() if name != "X-Session-ID"}
        headers = {name: value for name, value in hint.items() if name not in extra}
        extra |= options.pop("extra_body", {})
        return super().send(said, extra_body=extra, extra_headers=headers, **options)


@pytest.fixture(scope="module")
def num_cached(release):
    """By server."""
    return {}


@pytest.mark.parametrize("name", SERVERS)
def test_tokens_are_the_same_with_both_tiers(release, num_cached, tmp_path, name):
    model, blocks, flags = SERVERS[name]
    is_stored, expected = "stored" in name, expected_of(release, model)
    flags = ("--num-gpu-blocks-override", str(blocks), *flags, *MANY_PREFILLS, *HOST_TIER)
    if is_stored:
        flags = (*flags, "--kvcache-storage-dir", str(tmp_path / "stored"))
    with started(release, tmp_path, *flags, model=model) as (server, client):
        workload = Workload(client)
        workload.run()
        workload.assert_tokens_of(expected)
        assert_cached(workload, documents=name != "selective")
        num_cached[name] = workload.cached_tokens()
        if blocks < NUM_DOCUMENTS * 6:
            assert_swapped(server, model)
        else:
            assert_shared(server, client, is_certain=release != "2.5")
            assert_refuses_what_the_worker_cannot_do(client)
        if name == "default":
            hinted = Hinted(client, server)
            hinted.run()
            hinted.assert_tokens_of(expected)
            assert hinted.num_told > 50
    if name == "default" and "selective" in num_cached:
        assert num_cached[name] > num_cached["selective"], "what was the default, at best"
    if is_stored:
        with started(release, tmp_path, *flags, model=model) as (_, client):
            again = ask(client, document(0))
            assert again.tokens == expected.answers["document 0 round 0"].tokens
            assert again.cached_tokens >= 5 * BLOCK_SIZE


def assert_refuses_what_the_worker_cannot_do(client):
    for given in ({"presence_penalty": 1.0}, {"frequency_penalty": -1.0}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(openai.APIStatusError, match=f"{next(iter(given))} is not supported by the CPU worker"):
            client.chat.completions.create(model="default", messages=user("x"), max_tokens=4, **given)


def assert_shared(server, client, *, is_certain):
    """Equal new prompts come while the worker stands still. FastDeploy fetches no more while one that came before them
    waits for its batch; then it fetches two at once, which fit its limit of blocks, and the batch computes one of them.
    The loop of 2.5 nearly always schedules the first one before the other one is in its queue.
    """

    worker = server.worker()
    with ThreadPoolExecutor(8) as pool:
        for burst in range(20 if is_certain else 1):
            worker.suspend()
            for busy in (200, 300):
                pool.submit(ask, client, document(busy + burst), max_tokens=4)
                time.sleep(0.3)
            asked = [pool.submit(ask, client, noise(100 + burst, 320), max_tokens=4) for _ in range(6)]
            time.sleep(0.3)
            worker.resume()
            assert len({each.result().tokens for each in asked}) == 1
            if server.metrics()["shared_prefill_tokens_total"]:
                return
    shared = lambda: server.metrics()["shared_prefill_tokens_total"]  # noqa: E731  published now and then
    wait_until(lambda: not is_certain or shared() > 0, "a burst that came at once", 5.0)


def assert_cached(workload, *, documents=True):
    """Repeats and later turns find everything but the last, incomplete block. Without `documents`, only what was hit
    before it left the device.
    """
    names = [f"hot {index}" for index in range(4)]
    names += [f"document {index}" for index in range(NUM_DOCUMENTS) if documents]
    for name in names:
        assert workload.answers[f"{name} round 0"].cached_tokens == 0
        for each in (1, 2):
            assert workload.answers[f"{name} round {each}"].cached_tokens >= 5 * BLOCK_SIZE, name
    for index in range(NUM_CONVERSATIONS):
        for turn in range(1, TURNS):
            cached = workload.answers[f"conversation {index} turn {turn}"].cached_tokens
            assert not documents or cached >= turn * BLOCK_SIZE


def assert_swapped(server, model):
    """Both ways, the same on every rank; host blocks are as many and as large as asked, and the engine counts what the
    workers copied. All of it once the last copies are made and published.
    """
    ranks = len(server.workers())
    block_bytes = model.block_bytes(ranks)

    def copied(rank=0):
        totals = server.worker_copies(rank)
        assert totals.swap_out.bytes == totals.swap_out.blocks * block_bytes
        return totals.swap_out.blocks, totals.swap_in.blocks

    def expected():
        return {
            "host_blocks": int(0.02 * GIB) // (ranks * block_bytes),
            "swap_out_blocks_total": copied()[0],
            "swap_in_blocks_total": copied()[1],
            "swap_blocks_total": ranks * sum(copied()),
            "swap_bytes_total": ranks * sum(copied()) * block_bytes,
            "transfer_failures_total": 0,
            "changed_bodies": 0,
        }

    def shown():
        metrics = server.metrics()
        return {name: metrics.get(name) for name in expected()}

    wait_until(lambda: shown() == expected(), lambda: f"{expected()} in the metrics: {shown()}")
    assert {copied(rank) for rank in range(ranks)} == {copied()}
    assert min(copied()) > 0
    assert server.metrics()["swap_seconds_total"] > 0
    logs = [path.read_text(errors="replace") for path in server.logs.rglob("*log*") if path.is_file()]
    line = f" host blocks of {block_bytes} bytes on each of {ranks} tensor-parallel ranks"
    assert any(line in text for text in logs)
    assert not any("the engine expected" in text for text in logs), "the worker allocates what the engine counted"


def test_the_smallest_device_tier_and_a_restart(release, tmp_path):
    """Four blocks, each sequence needs up to two; the second server knows nothing of the first."""
    flags = ("--num-gpu-blocks-override", "4", "--max-model-len", "128", "--max-num-batched-tokens", "128", *HOST_TIER)
    outputs = []
    for _ in range(2):
        with started(release, tmp_path, *flags, *THROUGH) as (server, client):
            asked = [ask(client, f"{each % 6} " + "x" * 70) for each in range(12)]
            outputs.append([answer.tokens for answer in asked])
            assert [answer.cached_tokens for answer in asked] == [0] * 6 + [BLOCK_SIZE] * 6
            assert server.worker_copies().swap_in.blocks > 0
    assert outputs[0] == outputs[1]
    assert outputs[0][:6] == outputs[0][6:]


@pytest.mark.parametrize(("ranks", "failing"), [(1, 0), (2, 0), (2, 1)])
def test_failing_copies_cost_time_but_no_token(release, expected, tmp_path, ranks, failing):
    """Some swap-ins of one rank fail: their sequences are computed again, over the blocks that did not arrive."""
    faults = {"ranks": [failing], "seed": 3, "max_delay_ms": 2, "fail": {"swap_in": [1, 30, 77], "swap_out": [5]}}
    environment = {"FASTDEPLOY_KVCACHE_COPY_FAULTS": json.dumps(faults)}
    flags = ("--num-gpu-blocks-override", "16", *THROUGH, *HOST_TIER, "--tensor-parallel-size", str(ranks))
    with started(release, tmp_path, *flags, environment=environment) as (server, client):
        workload = Workload(client)
        workload.documents()
        workload.assert_tokens_of(expected)
        failed = [server.failed_copies(rank) for rank in range(ranks)]
        assert [rank for rank, count in enumerate(failed) if count] == [failing]
        wait_until(lambda: server.metrics()["transfer_failures_total"] == sum(failed), "the engine to hear of them")
        wait_until(lambda: server.metrics()["failed_transfer_blocks_total"] > 0, "the engine to forget host blocks")
        assert ask(client, document(0)).tokens == expected.answers["document 0 round 0"].tokens
