"""Prefill and decode servers behind FastDeploy's router: tokens are those of a mixed server, and nothing is left."""

import math
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import openai
import pytest

from tests.fault_proxy import Fault

from .cpu_server import wait_until
from .role_servers import FORMS, PROMPTS, ask, hear, num_fetches, servers, stream, wait_idle
from .server_workload import noise

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(900)]

BLOCK = 64
"""Tokens."""

SWAPPING = ("--num-gpu-blocks-override", "28", "--swap-space", "0.02")
"""Both servers swap, between two tiers that hold all prompts together."""


@pytest.fixture(scope="module")
def group(release, tmp_path_factory):
    """A prefill, a decode and a mixed server."""
    with servers(release, tmp_path_factory.mktemp("roles")) as made:
        started = {
            "prefill": made.begin("prefill", "prefill", *SWAPPING, "--write-policy", "write_through", proxied=True),
            "decode": made.begin("decode", "decode", *SWAPPING),
            "mixed": made.begin("mixed", "mixed"),
        }
        made.wait_ready()
        yield made, started


@pytest.fixture(scope="module")
def expected(group):
    _, started = group
    with started["mixed"].client() as client:
        return [ask(client, prompt) for prompt in PROMPTS]


@pytest.fixture
def client(group):
    with group[0].router.client() as made:
        yield made


def both(group):
    return group[1]["prefill"], group[1]["decode"]


def fetched(decode):
    """Bytes so far, when nothing is under way."""
    wait_until(lambda: not decode.metrics()["transfer_open"], "the fetches to end")
    return decode.metrics()["transfer_bytes_total"]


def test_one_by_one(group, expected, client):
    """The second time blocks come from the host tiers, and decode reads from prefill what it does not have."""
    prefill, decode = both(group)
    received = [fetched(decode)]
    for _ in range(2):
        assert [ask(client, prompt) for prompt in PROMPTS] == expected
        wait_idle(prefill, decode)
        received.append(fetched(decode))
    for server in (prefill, decode):
        assert server.worker_copies().swap_in.blocks > 0
        assert server.failed_copies() == 0
    first, second = (end - begin for begin, end in pairwise(received))
    assert second < first / 2, "most of each prompt is cached at decode"
    leases = lambda: prefill.metrics()["transfers_started_total"]  # noqa: E731  published now and then
    wait_until(lambda: leases() == num_fetches(decode), "a lease of each fetch in the metrics")


def test_a_second_turn_fetches_only_its_tail(group, client):
    prefill, decode = both(group)
    turn = [{"role": "user", "content": noise(500, 400)}]
    replies, received, hits = [], [fetched(decode)], []
    with group[1]["mixed"].client() as mixed:
        for _ in range(2):
            options = {"model": "tiny", "messages": turn, "max_tokens": 80, "temperature": 0, "top_p": 0}
            answers = [
                each.chat.completions.create(**options, extra_body={"return_token_ids": True, "min_tokens": 80})
                for each in (client, mixed)
            ]
            tokens = [each.choices[0].message.completion_token_ids for each in answers]
            assert tokens[0] == tokens[1]
            replies.append(answers[0])
            wait_idle(prefill, decode)
            received.append(fetched(decode))
            hits.append(decode.metrics()["device_hit_tokens_total"] + decode.metrics()["host_hit_tokens_total"])
            answer = {"role": "assistant", "content": answers[0].choices[0].message.content}
            turn = [*turn, answer, {"role": "user", "content": "and then?"}]
    prompts = [math.ceil(each.usage.prompt_tokens / BLOCK) for each in replies]
    first, second = (end - begin for begin, end in pairwise(received))
    found = (hits[1] - hits[0]) / BLOCK
    assert found >= prompts[0] - 2, "the first turn, but for its last blocks"
    assert second / (prompts[1] - found) == first / prompts[0], "bytes of a block"


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.RESET])
def test_bytes_that_change_or_break_off_fail_their_requests_and_no_others(group, expected, client, fault):
    made, decode = group[0], group[1]["decode"]
    before = decode.metrics()
    with made.fault(fault), ThreadPoolExecutor(4) as pool:
        for asked in [pool.submit(ask, client, prompt) for prompt in PROMPTS[:4]]:
            assert isinstance(asked.exception(), openai.APIError)
        for form in FORMS:
            error, tokens = hear(made.router.url, *form, PROMPTS[4])
            assert tokens == []
            assert "blocks of" in error or "failed to send cache" in error, "and nothing that names something else"
    wait_idle(*both(group))
    after = decode.metrics()
    assert after["transfers_started_total"] - before["transfers_started_total"] >= 8
    assert after["transfer_bytes_total"] == before["transfer_bytes_total"]
    assert [ask(client, prompt) for prompt in PROMPTS[:4]] == expected[:4]
    for form in FORMS:
        assert hear(made.router.url, *form, PROMPTS[4]) == hear(group[1]["mixed"].url, *form, PROMPTS[4])


def test_eight_at_a_time(group, expected, client):
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: ask(client, prompt), PROMPTS * 2)) == expected * 2
    wait_idle(*both(group))


def test_streams(group, expected, client):
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: stream(client, prompt), PROMPTS)) == expected
    wait_idle(*both(group))


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 1},
        {"max_tokens": 2},
        {"max_tokens": 200, "extra_body": {"min_tokens": 200}},
        {"temperature": 0.9, "top_p": 0.8, "seed": 3, "max_tokens": 30},
    ],
)
def test_limits_and_seeds(group, client, options):
    with group[1]["mixed"].client() as mixed:
        for prompt in PROMPTS[:3]:
            assert ask(client, prompt, **options) == ask(mixed, prompt, **options)
    wait_idle(*both(group))


def test_an_abort_frees_both_servers(group, client):
    decode = group[1]["decode"]
    before = num_fetches(decode)
    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, client, prompt, max_tokens=400) for prompt in PROMPTS[:4]]
        wait_until(lambda: num_fetches(decode) > before, "requests at decode")
        decode.control("abort_requests", abort_all=True)
        for each in asked:
            each.exception()
    wait_idle(*both(group))
