"""Whatever the cache does, the real server's tokens are those of FastDeploy without a prefix cache."""

import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from .cpu_server import BLOCK_SIZE, started, wait_until
from .server_workload import NUM_CONVERSATIONS, NUM_DOCUMENTS, TURNS, Workload, document, noise, user

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(900)]

HOST_TIER = ("--swap-space", "0.02")
MANY_PREFILLS = ("--max-num-partial-prefills", "4", "--max-long-partial-prefills", "4")  # prompts fetched at once


@pytest.fixture(scope="module")
def expected(release, tmp_path_factory):
    """FastDeploy as it is without us, prefix cache off."""
    directory = tmp_path_factory.mktemp("reference")
    flags = ("--no-enable-prefix-caching", "--num-gpu-blocks-override", "256")
    with started(release, directory, *flags, manager=False) as server, server.client() as client:
        workload = Workload(server, client)
        workload.run()
        assert all(answer.cached_tokens == 0 for answer in workload.answers.values())
        assert server.stop() == 0, server.stderr
    return workload


def test_the_workload_says_something(expected):
    answers = expected.answers
    assert len({answers[f"document {index} round 0"].tokens for index in range(NUM_DOCUMENTS)}) == NUM_DOCUMENTS
    assert len({answers[f"seed {seed}"].tokens for seed in range(3)}) == 3
    assert len(answers["minimum"].tokens) == 40
    assert answers["stop"].finish_reason == "stop"
    assert len(answers["stop"].tokens) < len(answers["no stop"].tokens)


SERVERS = {
    # what says what is copied when: device blocks, flags. The default is `auto` and `adaptive`.
    "write_through": (16, ("--write-policy", "write_through")),
    "write_back": (16, ("--write-policy", "write_back")),
    "enough": (64, ("--write-policy", "write_through")),
    "selective": (16, ("--write-through-threshold", "1")),
    "default": (16, ()),
}


@pytest.fixture(scope="module")
def num_cached(release):
    """By server."""
    return {}


@pytest.mark.parametrize("name", SERVERS)
def test_tokens_are_the_same_with_both_tiers(release, expected, num_cached, tmp_path, name):
    blocks, flags = SERVERS[name]
    flags = ("--num-gpu-blocks-override", str(blocks), *flags, *MANY_PREFILLS, *HOST_TIER)
    with started(release, tmp_path, *flags) as server, server.client() as client:
        workload = Workload(server, client)
        workload.run()
        assert workload.tokens() == expected.tokens()
        assert_cached(workload, documents=name != "selective")
        num_cached[name] = workload.cached_tokens()
        if blocks < NUM_DOCUMENTS * 6:
            assert_swapped(server)
        else:
            assert_shared(server, client, is_certain=release != "2.5")
            assert_refuses_what_the_worker_cannot_do(client)
        assert server.stop() == 0, server.stderr
    if name == "default" and "selective" in num_cached:
        assert num_cached[name] > num_cached["selective"], "what was the default, at best"


def assert_refuses_what_the_worker_cannot_do(client):
    for given in ({"presence_penalty": 1.0}, {"frequency_penalty": -1.0}, {"response_format": {"type": "json_object"}}):
        with pytest.raises(openai.APIStatusError, match=f"the CPU worker has no {next(iter(given))}: leave it out"):
            client.chat.completions.create(model="default", messages=user("x"), max_tokens=4, **given)


def assert_shared(server, client, *, is_certain):
    """Equal new prompts come while the worker stands still. FastDeploy fetches no more while one that came before them
    waits for its batch; then it fetches two at once, which fit its limit of blocks, and the batch computes one of them.
    The loop of 2.5 nearly always schedules the first one before the other one is in its queue.
    """

    def ask(messages):
        return server.ask(client, messages, max_tokens=4)

    worker = server.worker()
    with ThreadPoolExecutor(8) as pool:
        for burst in range(20 if is_certain else 1):
            worker.suspend()
            for busy in (200, 300):
                pool.submit(ask, document(busy + burst))
                time.sleep(0.3)
            asked = [pool.submit(ask, user(noise(100 + burst, 320))) for _ in range(6)]
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


def assert_swapped(server):
    """Both ways, and the scheduler counts what the worker copied."""
    copies = server.worker_copies()
    copied = copies.swap_out.blocks, copies.swap_in.blocks
    assert min(copied) > 0
    assert server.failed_copies() == 0

    def is_published():  # now and then
        metrics = server.metrics()
        return (metrics["swap_out_blocks_total"], metrics["swap_in_blocks_total"]) == copied

    wait_until(is_published, "the metrics to agree with the worker")


def test_the_smallest_device_tier_and_a_restart(release, expected, tmp_path):
    """Four blocks, each sequence needs up to two; the second server knows nothing of the first."""
    flags = ("--num-gpu-blocks-override", "4", "--max-model-len", "128", "--max-num-batched-tokens", "128", *HOST_TIER)
    outputs = []
    for _ in range(2):
        with started(release, tmp_path, *flags, "--write-policy", "write_through") as server, server.client() as client:
            asked = [server.ask(client, [{"role": "user", "content": f"{each % 6} " + "x" * 70}]) for each in range(12)]
            outputs.append([answer.tokens for answer in asked])
            assert [answer.cached_tokens for answer in asked] == [0] * 6 + [BLOCK_SIZE] * 6
            assert server.worker_copies().swap_in.blocks > 0
            assert server.stop() == 0, server.stderr
    assert outputs[0] == outputs[1]
    assert outputs[0][:6] == outputs[0][6:]


def test_what_is_slower_to_load_than_to_compute_is_computed(release, expected, tmp_path):
    """Each layer of a swap-in is held up for two seconds, which is worth more than 400 tokens of a tiny model."""
    flags = ("--num-gpu-blocks-override", "16", *HOST_TIER)
    environment = {"FASTDEPLOY_KVCACHE_COPY_FAULTS": '{"delay_ms": {"input": 2000}}'}
    with started(release, tmp_path, *flags, environment=environment) as server, server.client() as client:
        workload = Workload(server, client)
        workload.documents()
        assert all(tokens == expected.answers[name].tokens for name, tokens in workload.tokens().items())
        copies = server.worker_copies()
        num_repeats = 2 * NUM_DOCUMENTS
        assert 0 < copies.swap_in.blocks < 6 * num_repeats / 2
        wait_until(lambda: server.metrics()["declined_load_tokens_total"] > 0, "the metrics")
        declined = server.metrics()["declined_load_tokens_total"] / BLOCK_SIZE
        cached = workload.cached_tokens() / BLOCK_SIZE
        assert copies.swap_in.blocks <= cached <= 6 * num_repeats - declined
        assert server.stop() == 0, server.stderr


def test_failing_copies_cost_time_but_no_token(release, expected, tmp_path):
    """Some swap-ins fail: their sequences are computed again, over the blocks that did not arrive."""
    faults = '{"seed": 3, "max_delay_ms": 2, "fail": {"input": [1, 30, 77], "output": [5]}}'
    flags = ("--num-gpu-blocks-override", "16", "--write-policy", "write_through", *HOST_TIER)
    environment = {"FASTDEPLOY_KVCACHE_COPY_FAULTS": faults}
    with started(release, tmp_path, *flags, environment=environment) as server, server.client() as client:
        workload = Workload(server, client)
        workload.documents()
        names = [f"document {index} round {each}" for each in range(3) for index in range(NUM_DOCUMENTS)]
        assert workload.tokens() == {name: expected.answers[name].tokens for name in names}
        failed = server.failed_copies()
        assert failed > 0
        wait_until(lambda: server.metrics()["transfer_failures_total"] == failed, "the engine to hear of the failures")
        wait_until(lambda: server.metrics()["failed_transfer_blocks_total"] > 0, "the engine to forget host blocks")
        assert server.ask(client, document(0)).tokens == expected.answers["document 0 round 0"].tokens
        assert server.stop() == 0, server.stderr
