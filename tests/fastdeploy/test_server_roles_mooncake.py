"""Mooncake's Transfer Engine between FastDeploy's roles, over TCP."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.mooncake_master import needs_mooncake

from .role_servers import LIMITS, PROMPTS, ask, free_port, num_fetches, servers, wait_idle

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(900), needs_mooncake()]

SWAPPING = ("--swap-space", "0.02")


def test_tokens_are_those_of_a_mixed_server(release, tmp_path):
    """Then a prefill server that ends under load: its requests fail or are answered, and another one is read from."""
    with servers(release, tmp_path, free_port(), LIMITS, plane="mooncake") as made:
        mixed, prefill, decode = (made.begin(role, role, *SWAPPING) for role in ("mixed", "prefill", "decode"))
        for each in (mixed, prefill, decode):
            each.wait_ready()
        made.router.wait_registered(prefill=1, decode=1)
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

        with made.router.client() as client, ThreadPoolExecutor(8) as pool:
            under_way = [pool.submit(ask, client, f"{prompt} again") for prompt in PROMPTS]
            prefill.kill()
            for each in under_way:
                each.exception()
        wait_idle(decode)
        again = made.begin("prefill", "again", *SWAPPING)
        again.wait_ready()
        made.router.wait_registered(prefill=1, decode=1)
        with made.router.client() as client:
            assert [ask(client, prompt) for prompt in PROMPTS] == expected
        wait_idle(again, decode)
