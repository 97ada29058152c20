"""Prefill and decode servers behind FastDeploy's router: tokens are those of a mixed server, and nothing is left."""

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.fault_proxy import Fault

from .cpu_server import wait_until
from .role_servers import LIMITS, PROMPTS, ask, free_port, num_fetches, servers, stream, wait_idle

pytestmark = [pytest.mark.fastdeploy, pytest.mark.timeout(900)]

SWAPPING = ("--num-gpu-blocks-override", "28", "--swap-space", "0.02", "--write-policy", "write_through")
"""Prefill swaps, between two tiers that hold all prompts together."""


@pytest.fixture(scope="module")
def group(release, tmp_path_factory):
    """A prefill, a decode and a mixed server."""
    with servers(release, tmp_path_factory.mktemp("roles"), free_port(), LIMITS) as made:
        started = {
            "prefill": made.begin("prefill", "prefill", *SWAPPING, proxied=True),
            **{role: made.begin(role, role) for role in ("decode", "mixed")},
        }
        for each in started.values():
            each.wait_ready()
        made.router.wait_registered(prefill=1, decode=1)
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


def test_one_by_one(group, expected, client):
    """The second time blocks come from the host tier of prefill, and decode reads them as any other."""
    assert [ask(client, prompt) for prompt in PROMPTS * 2] == expected * 2
    prefill, decode = both(group)
    wait_idle(prefill, decode)
    assert prefill.worker_copies().swap_in.blocks > 0
    assert prefill.failed_copies() == 0
    leases = lambda: prefill.metrics()["transfers_started_total"]  # noqa: E731  published now and then
    wait_until(lambda: leases() == num_fetches(decode), "a lease of each fetch in the metrics")


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.RESET])
def test_bytes_that_change_or_break_off_fail_their_requests_and_no_others(group, expected, client, fault):
    made, decode = group[0], group[1]["decode"]
    before = decode.metrics()
    with made.fault(fault), ThreadPoolExecutor(4) as pool:
        for asked in [pool.submit(ask, client, prompt) for prompt in PROMPTS[:4]]:
            # The router of 2.6 tries it four times; then a chat ends with "pd_reschedule" and without a token.
            assert isinstance(asked.exception(), openai.APIError) or asked.result() == ()
    wait_idle(*both(group))
    after = decode.metrics()
    assert after["transfers_started_total"] - before["transfers_started_total"] >= 4
    assert after["transfer_bytes_total"] == before["transfer_bytes_total"]
    assert [ask(client, prompt) for prompt in PROMPTS[:4]] == expected[:4]


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


def test_pause_is_refused_and_harms_nothing(group, expected, client):
    for server in both(group):
        with pytest.raises(AssertionError, match="not supported with --splitwise-role"):
            server.control("pause")
    assert ask(client, PROMPTS[0]) == expected[0]
