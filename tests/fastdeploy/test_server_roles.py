"""Prefill and decode servers behind FastDeploy's router: tokens are those of a mixed server, and nothing is left,
whatever breaks off, is aborted, paused or put to sleep.
"""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import openai
import pytest

from fastdeploy_kvcache_v1.lab.model.directory import write_seed
from tests.fault_proxy import Fault

from .cpu_server import wait_until
from .role_servers import FORMS, PROMPTS, ask, hear, num_fetches, servers, wait_idle

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(900)]

ROLES = ("prefill", "decode")
THROUGH = ("--write-policy", "write_through")
SWAPPING = ("--num-gpu-blocks-override", "28", "--swap-space", "0.02")
"""Both servers swap, between two tiers that hold all prompts together."""


@pytest.fixture(scope="module")
def group(release, tmp_path_factory):
    """A prefill, a decode and a mixed server."""
    with servers(release, tmp_path_factory.mktemp("roles")) as made:
        recorded = {role: (*SWAPPING, "--record-trace", str(made.directory / f"{role}.jsonl")) for role in ROLES}
        started = {
            "prefill": made.begin("prefill", "prefill", *recorded["prefill"], *THROUGH, proxied=True),
            "decode": made.begin("decode", "decode", *recorded["decode"]),
            "mixed": made.begin("mixed", "mixed"),
        }
        made.wait_ready()
        yield made, started


@pytest.fixture(scope="module")
def expected(group):
    with group[1]["mixed"].client() as client:
        return [ask(client, prompt) for prompt in PROMPTS]


@pytest.fixture
def client(group):
    """Both servers are idle after each test."""
    with group[0].router.client() as made:
        yield made
    wait_idle(*both(group))


def both(group):
    return [group[1][role] for role in ROLES]


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


def test_eight_streams_at_a_time(group, expected, client):
    with ThreadPoolExecutor(8) as pool:
        heard = pool.map(lambda prompt: hear(group[0].router.url, "chat/completions", True, prompt), PROMPTS * 2)
        assert list(heard) == [(None, list(tokens)) for tokens in expected * 2]


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


def test_session_and_time_of_return_reach_both_servers(group, client):
    def recorded(role, number):
        lines = (group[0].directory / f"{role}.jsonl").read_text().splitlines()
        return [json.loads(line).get(name) for line in lines for name in ("session_id", "return_in_s")][-2 * number :]

    assert ask(client, PROMPTS[0], extra_body={"session_id": "a", "return_in_s": 0.25}) == ask(client, PROMPTS[0])
    for role in ROLES:
        wait_until(lambda role=role: recorded(role, 2)[1:] == [0.25, None, None], "lines of both requests")
        assert recorded(role, 2)[0] is not None


# ---- what is asked of a server while requests are under way


def under_way(group, client, pool, count=8, **options):
    """Requests, some of which have reached decode."""
    before = num_fetches(group[1]["decode"])
    asked = [pool.submit(ask, client, prompt, **options) for prompt in (PROMPTS * 2)[:count]]
    wait_until(lambda: num_fetches(group[1]["decode"]) > before, "requests at decode")
    return asked


def is_refused(call):
    error = call.exception(600)
    assert not isinstance(error, openai.APITimeoutError), "somebody waits for ever"
    assert error is not None or call.result(), "an answer without a token says nothing"
    return isinstance(error, openai.APIError)


def tokens(client):
    return [ask(client, prompt) for prompt in PROMPTS[:6]]


def test_an_abort_frees_both_servers(group, client):
    with ThreadPoolExecutor(4) as pool:
        asked = under_way(group, client, pool, 4, max_tokens=400)
        group[1]["decode"].control("abort_requests", abort_all=True)
        for each in asked:
            each.exception()


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("max_tokens", [4, 400])
def test_pause_while_requests_are_under_way(group, expected, client, role, max_tokens):
    """Many that are short, so that they are asked for and read, or a few that run."""
    paused = group[1][role]
    with ThreadPoolExecutor(24) as pool:
        asked = under_way(group, client, pool, 2 * len(PROMPTS), max_tokens=max_tokens)
        paused.control("pause")
        assert paused.control("is_paused")["result"] == {"is_paused": True}
        ended = [is_refused(each) for each in asked]
        if role == "decode" and max_tokens == 400:
            assert any(ended)
        wait_idle(*both(group))
        assert paused.metrics()["device_cached_blocks"] == 0
        assert is_refused(pool.submit(ask, client, PROMPTS[0]))
    wait_idle(*both(group))
    paused.control("resume")
    assert tokens(client) == expected[:6]


@pytest.mark.parametrize("tags", ["kv_cache", "weight", "weight,kv_cache"])
@pytest.mark.parametrize("role", ROLES)
def test_sleep_and_wakeup(group, expected, client, role, tags):
    with ThreadPoolExecutor(8) as pool:
        asked = under_way(group, client, pool, max_tokens=100)
        group[1][role].control("sleep", tags=tags)
        for each in asked:
            is_refused(each)
        assert is_refused(pool.submit(ask, client, PROMPTS[0]))
    group[1][role].control("wakeup", tags=tags)
    assert tokens(client) == expected[:6]


def test_nothing_computed_with_old_weights_is_used_with_new_ones(group, expected, client):
    for seed in (1, 0):
        for server in both(group):
            server.control("pause")
            write_seed(server.model, seed)
            server.control("update_weights")
        for server in both(group):
            server.control("resume")
        answers = tokens(client)
        assert (answers == expected[:6]) == (seed == 0)
        assert tokens(client) == answers
