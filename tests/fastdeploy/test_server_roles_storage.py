"""A prefill server with a store: what it once computed it gets from there, and decode reads it as any other."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from .cpu_server import wait_until
from .role_servers import LIMITS, PROMPTS, ask, free_port, servers, wait_idle

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(900)]


def flags(directory):
    return (
        *("--num-gpu-blocks-override", "64", "--swap-space", "0.02", "--write-policy", "write_through"),
        *("--kvcache-storage-backend", "file", "--kvcache-storage-dir", str(directory)),
        *("--storage-prefetch", "wait_complete"),
    )


def test_blocks_outlive_a_pause_and_the_server(release, tmp_path):
    """A pause empties both tiers of prefill."""
    with servers(release, tmp_path, free_port(), LIMITS) as made:
        prefill = made.begin("prefill", "prefill", *flags(tmp_path / "kv"))
        decode = made.begin("decode", "decode")
        for each in (prefill, decode):
            each.wait_ready()
        made.router.wait_registered(prefill=1, decode=1)
        with made.router.client() as client:
            expected = [ask(client, prompt) for prompt in PROMPTS]

            def is_stored():
                ask(client, "go on", max_tokens=1)  # the last copies ride on a batch
                return prefill.metrics()["storage_blocks_total"] >= 20

            wait_until(is_stored, lambda: f"blocks to be stored: {prefill.metrics()['storage_blocks_total']}", 120.0)
            prefill.control("pause")
            prefill.control("resume")
            assert_loaded(prefill, client, expected)
            wait_idle(prefill, decode)
            prefill.kill()
            again = made.begin("prefill", "again", *flags(tmp_path / "kv"))
            again.wait_ready()
            made.router.wait_registered(prefill=1, decode=1)
            assert_loaded(again, client, expected)
            wait_idle(again, decode)


def assert_loaded(prefill, client, expected):
    """Eight at a time: some wait for the store, others pass."""
    before = prefill.metrics()["storage_found_blocks_total"]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda prompt: ask(client, prompt), PROMPTS)) == expected
    wait_until(lambda: prefill.metrics()["storage_found_blocks_total"] >= before + 10, "blocks from the store")
    assert prefill.failed_copies() == 0
