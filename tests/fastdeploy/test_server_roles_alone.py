"""Prefill and decode servers that a test has to itself: they die, stand still, are full, begin with a burst,
have a store, or read over Mooncake.

Not beside those of test_server_roles.py: FastDeploy's processes use the processor while they wait.
"""

import signal
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from fastdeploy_kvcache_v1.lab.fastdeploy_cpu import supervisor
from fastdeploy_kvcache_v1.storage.file.value_files import stored_files
from tests.mooncake_master import free_port, needs_mooncake

from .cpu_server import BLOCK_SIZE, wait_until
from .role_servers import FORMS, PROMPTS, ask, hear, num_fetches, servers, wait_idle

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(900)]


def test_a_cold_burst_for_one_prefill_and_three_decode_servers(release, tmp_path):
    """Every pair of servers makes its link while requests for it wait."""
    with servers(release, tmp_path) as made:
        prefill = made.begin("prefill", "prefill")
        decodes = [made.begin("decode", f"decode{number}") for number in range(3)]
        made.wait_ready(3)
        answers = defaultdict(set)
        with made.router.client(timeout_s=300.0) as client, ThreadPoolExecutor(64) as pool:
            asked = [(prompt, pool.submit(ask, client, prompt, max_tokens=4)) for prompt in (PROMPTS * 5)[:64]]
            for prompt, each in asked:
                answers[prompt].add(each.result())
        assert all(len(each) == 1 for each in answers.values())
        wait_idle(prefill, *decodes)
        assert min(num_fetches(decode) for decode in decodes) > 0
        assert sum(num_fetches(decode) for decode in decodes) == 64


def test_two_hundred_requests_through_a_decode_server_that_holds_six(release, tmp_path):
    """2.6 alone stands still as soon as requests that have their blocks fill it."""
    with servers(release, tmp_path) as made:
        prefill = made.begin("prefill", "prefill")
        decode = made.begin("decode", "decode", "--num-gpu-blocks-override", "40")
        made.wait_ready()
        with made.router.client(timeout_s=300.0) as client, ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: ask(client, PROMPTS[number % 12], max_tokens=4), range(200)))
        assert all(len(answer) == 4 for answer in answers)
        assert len(set(answers)) <= 12, "the same prompt has the same answer"
        wait_idle(prefill, decode)


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_server_that_dies_or_stops_costs_its_peer_nothing(release, tmp_path, role, number):
    """Requests of both fail, their blocks and seats at the other one come back. When it goes on, or another one listens
    at its port, the two serve.
    """
    with servers(release, tmp_path) as made:
        flags = {"prefill": (), "decode": ("--rdma-comm-ports", str(free_port()))}
        running = {each: made.begin(each, each, *flags[each]) for each in flags}
        made.wait_ready()
        peer = running["decode" if role == "prefill" else "prefill"]
        shortly = {"timeout_s": 30.0}  # before an unhealthy server is ended
        with made.router.client(**shortly) as client, ThreadPoolExecutor(12) as pool:
            first = ask(client, PROMPTS[0])
            before = num_fetches(running["decode"])
            asked = [pool.submit(ask, client, prompt, max_tokens=400) for prompt in PROMPTS[:8]]
            others = [pool.submit(hear, made.router.url, *form, PROMPTS[8], **shortly) for form in FORMS]
            wait_until(lambda: num_fetches(running["decode"]) > before, "requests at decode")
            stopped = [each for each in running[role].processes() if supervisor.__name__ not in each.cmdline()]
            for process in stopped:
                process.send_signal(number)
            for each in asked:
                assert isinstance(each.exception(), openai.APIError) if each.exception() else each.result()
            heard = [each.result() for each in others]
            wait_idle(peer)
            if number == signal.SIGSTOP:
                for process in stopped:
                    process.send_signal(signal.SIGCONT)
            else:
                running[role].kill()
                running[role] = made.begin(role, "another", *flags[role])
                made.wait_ready()
            wait_until(lambda: _answers(client) == first, "an answer", 120.0)
            for form, (error, tokens) in zip(FORMS, heard, strict=True):
                assert error or (None, tokens) == hear(made.router.url, *form, PROMPTS[8])
        wait_idle(*running.values())


def _answers(client):
    try:
        return ask(client, PROMPTS[0])
    except openai.APIError:
        time.sleep(0.5)  # the router looks every five seconds
        return None


def test_stored_blocks_outlive_a_pause(release, tmp_path):
    """Which empties both tiers of prefill. Then eight at a time: some wait for the store, others pass."""
    store = ("--kvcache-storage-backend", "file", "--kvcache-storage-dir", str(tmp_path / "kv"))
    tier = ("--swap-space", "0.02", "--write-policy", "write_through", "--storage-prefetch", "wait_complete")
    with servers(release, tmp_path) as made:
        prefill, decode = made.begin("prefill", "prefill", *tier, *store), made.begin("decode", "decode")
        made.wait_ready()
        with made.router.client() as client, ThreadPoolExecutor(8) as pool:
            expected = [ask(client, prompt) for prompt in PROMPTS]

            def is_stored():
                ask(client, "go on", max_tokens=1)  # the last copies ride on a batch
                return prefill.metrics()["storage_blocks_total"] >= 20

            wait_until(is_stored, lambda: f"blocks to be stored: {prefill.metrics()['storage_blocks_total']}", 120.0)
            prefill.control("pause")
            prefill.control("resume")
            before = prefill.metrics()["storage_found_blocks_total"]
            assert list(pool.map(lambda prompt: ask(client, prompt), PROMPTS)) == expected
        found = lambda: prefill.metrics()["storage_found_blocks_total"] - before  # noqa: E731  published now and then
        wait_until(lambda: found() >= 10, "blocks from the store")
        assert prefill.failed_copies() == 0
        wait_idle(prefill, decode)


def test_prefill_and_mixed_servers_find_what_decode_generated(release, tmp_path):
    directory = tmp_path / "kv"
    store = ("--kvcache-storage-backend", "file", "--kvcache-storage-dir", str(directory))
    tier = ("--swap-space", "0.02", "--storage-prefetch", "wait_complete", "--enable-output-caching", *store)
    with servers(release, tmp_path) as made:
        plain, mixed = made.begin("mixed", "plain"), made.begin("mixed", "mixed", *tier)
        prefill, decode = made.begin("prefill", "prefill", *tier), made.begin("decode", "decode", *tier)
        made.wait_ready()
        with made.router.client() as client, mixed.client() as beside, plain.client() as without:
            prompt = list(range(97, 117)) * 20
            generated = complete(client, prompt, 300)
            later, whole = [*prompt, *generated, 97], (400 + 300 - 1) // BLOCK_SIZE

            def are_stored():
                ask(client, "go on", max_tokens=1)  # the last copies ride on a batch
                return len(list(stored_files(directory))) >= whole

            wait_until(are_stored, lambda: f"{whole} blocks: {len(list(stored_files(directory)))}", 120.0)
            computed = complete(without, later)
            assert complete(beside, later) == computed
            wait_until(lambda: found(mixed) == whole, lambda: f"{whole} blocks from the store: {found(mixed)}")
            assert complete(client, later) == computed
        wait_until(lambda: found(prefill) == whole - 6, lambda: f"{whole - 6} blocks from the store: {found(prefill)}")
        wait_idle(prefill, decode)


def complete(client, prompt, num_tokens=12):
    """Tokens of a greedy completion of token ids."""
    extra = {"return_token_ids": True, "min_tokens": num_tokens}
    limits = {"max_tokens": num_tokens, "temperature": 0, "top_p": 0}
    reply = client.completions.create(model="tiny", prompt=prompt, extra_body=extra, **limits)
    return list(reply.choices[0].completion_token_ids)


def found(server):
    """Blocks found in the store since the server's start."""
    return server.metrics().get("storage_found_blocks_total", 0)


@needs_mooncake()
def test_tokens_over_mooncake_are_those_of_a_mixed_server(release, tmp_path):
    with servers(release, tmp_path, plane="mooncake") as made:
        mixed, prefill, decode = (
            made.begin(role, role, "--swap-space", "0.02") for role in ("mixed", "prefill", "decode")
        )
        made.wait_ready()
        with mixed.client() as client:
            expected = [ask(client, prompt) for prompt in PROMPTS]
        mixed.kill()
        with made.router.client() as client:
            assert [ask(client, prompt) for prompt in PROMPTS] == expected
            with ThreadPoolExecutor(8) as pool:
                assert list(pool.map(lambda prompt: ask(client, prompt), PROMPTS)) == expected
        wait_idle(prefill, decode)
        assert num_fetches(decode) == 2 * len(PROMPTS)
        assert decode.metrics()["transfer_bytes_total"] > 0
