"""Prefill and decode servers behind FastDeploy's router: tokens are those of a mixed server, and nothing is left."""

import signal
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from .cpu_server import wait_until
from .role_servers import ask, servers, stream, wait_idle
from .server_workload import noise

pytestmark = [pytest.mark.fastdeploy, pytest.mark.timeout(900)]

PROMPTS = [f"{'shared words ' * 20}question {number} {noise(number, number * 37 % 300)}" for number in range(12)]
PROMPTS += [noise(100, 600), "short", noise(101, 63)]
LIMITS = '{"silence_s": 4, "wait_s": 12, "lease_s": 12, "digest": true}'


def free_port():
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.fixture(scope="module")
def group(release, tmp_path_factory):
    """A prefill, a decode and a mixed server."""
    with servers(release, tmp_path_factory.mktemp("roles"), free_port(), LIMITS) as made:
        names = ("prefill", "decode", "mixed")
        started = {role: made.begin(role, role) for role in names}
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


def num_fetches(decode):
    """Since its start: a request may be over before anybody looks at how many there are."""
    return decode.metrics()["transfers_started_total"]


def both(group):
    return group[1]["prefill"], group[1]["decode"]


def test_one_by_one(group, expected, client):
    assert [ask(client, prompt) for prompt in PROMPTS] == expected
    wait_idle(*both(group))


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


def test_two_hundred_requests_through_a_decode_server_that_holds_six(release, tmp_path):
    """2.6 alone stands still as soon as requests that have their blocks fill it."""
    with servers(release, tmp_path, free_port(), LIMITS) as made:
        prefill = made.begin("prefill", "prefill")
        decode = made.begin("decode", "decode", "--num-gpu-blocks-override", "40")
        for each in (prefill, decode):
            each.wait_ready()
        made.router.wait_registered(prefill=1, decode=1)
        with made.router.client(timeout_s=300.0) as client, ThreadPoolExecutor(8) as pool:
            answers = list(pool.map(lambda number: ask(client, PROMPTS[number % 12], max_tokens=4), range(200)))
        assert all(len(answer) == 4 for answer in answers)
        assert len(set(answers)) <= 12, "the same prompt has the same answer"
        wait_idle(prefill, decode)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_prefill_server_that_dies_costs_decode_nothing(release, tmp_path, number):
    """Its requests fail, their blocks and seats come back, and another prefill server goes on."""
    with servers(release, tmp_path, free_port(), LIMITS) as made:
        prefill, decode = made.begin("prefill", "prefill"), made.begin("decode", "decode")
        for each in (prefill, decode):
            each.wait_ready()
        made.router.wait_registered(prefill=1, decode=1)
        with made.router.client(timeout_s=90.0) as client, ThreadPoolExecutor(8) as pool:
            first = ask(client, PROMPTS[0])
            before = num_fetches(decode)
            asked = [pool.submit(ask, client, prompt, max_tokens=400) for prompt in PROMPTS[:8]]
            wait_until(lambda: num_fetches(decode) > before, "requests at decode")
            stopped = [prefill.worker(), *prefill.processes()]
            for process in stopped:
                process.send_signal(number)
            for each in asked:
                if each.exception() is not None:
                    assert isinstance(each.exception(), openai.APIError)
            wait_idle(decode)
            if number == signal.SIGSTOP:
                for process in stopped:
                    process.send_signal(signal.SIGCONT)
            else:
                prefill.kill()
                prefill = made.begin("prefill", "another")
                prefill.wait_ready()
            made.router.wait_registered(prefill=1, decode=1)
            wait_until(lambda: _answers(client) == first, "an answer", 120.0)
        wait_idle(decode)


def _answers(client):
    try:
        return ask(client, PROMPTS[0])
    except openai.APIError:
        time.sleep(0.5)  # the router looks every five seconds
        return None


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
