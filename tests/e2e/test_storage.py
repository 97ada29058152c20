"""Real servers with a store between them: what one computed, the other one does not compute again.

The store with a real Mooncake is in `test_mooncake.py`.
"""

import hashlib
import json
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.storage.file.value_files import stored_files
from tests.e2e.server_process import started, wait_until
from tests.storage.attention_store.stand_in import environment, set_faults

pytestmark = pytest.mark.process

PROMPT = [1 + number % 250 for number in range(600)]
SIZE = ("--block-size", "16", "--num-gpu-blocks-override", "120", "--max-model-len", "900")
CACHED = 592
"""All whole blocks but the one of the last token."""


def prompt(number):
    """No two of the first 31 begin alike."""
    return [1 + (step * 7 + number * 8) % 250 for step in range(600)]


def num_values(directory):
    return sum(1 for _ in stored_files(directory))


def flags(backend, *others):
    """The last one of a kind counts."""
    waits = ("--kvcache-storage-backend", backend, "--storage-prefetch", "wait_complete")
    return [*SIZE, "--swap-space", "0.02", "--write-policy", "write_through", *waits, *others]


def file_flags(directory):
    return flags("file", "--kvcache-storage-dir", str(directory))


def ask(server, prompt=PROMPT, count=8):
    """Token ids of the answer, and how many tokens of the prompt were not computed."""
    with server.client() as client:
        answer = client.completions.create(
            model="default", prompt=prompt, max_tokens=count, temperature=0, extra_body={"return_token_ids": True}
        )
    assert answer.usage.prompt_tokens_details is not None
    return answer.choices[0].token_ids, answer.usage.prompt_tokens_details.cached_tokens


def wait_stored(server, blocks=CACHED // 16):
    wait_until(lambda: server.metrics()["storage_blocks_total{direction=store}"] >= blocks, "stored blocks")


def assert_they_share(one, two):
    """What one server has computed, the other one does not compute, either way."""
    for computes, finds, prompt in ((one, two, PROMPT), (two, one, PROMPT[::-1])):
        tokens, cached = ask(computes, prompt)
        assert cached == 0
        wait_stored(computes)
        assert ask(finds, prompt) == (tokens, CACHED)


def end(server):
    report = server.wait_idle()
    assert report["ok"], report
    assert server.stop() == 0, server.stderr
    server.assert_nothing_left()


ON_DEVICE = ("--swap-space", "0", "--write-policy", "auto")
STORES = {
    # backend: its flags, and the environment of its servers
    "file": lambda path: (file_flags(path), {}),
    "attention_store": lambda path: (flags("attention_store", *ON_DEVICE), environment(path)),
}


@pytest.mark.parametrize("backend", STORES)
def test_two_servers_share_what_they_compute(tmp_path, backend):
    words, variables = STORES[backend](tmp_path / "kv")
    with (
        started(tmp_path / "one", *words, environment=variables) as one,
        started(tmp_path / "two", *words, environment=variables) as two,
    ):
        assert_they_share(one, two)
        end(one)
        end(two)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reset_says_whether_the_store_is_kept_and_can_begin_a_new_one(tmp_path, ranks):
    def reset(query=""):
        return httpx2.post(f"{server.url}/reset_prefix_cache{query}", timeout=30.0).json()

    words = file_flags(tmp_path / "kv")
    with started(tmp_path / "server", *words, "--tensor-parallel-size", str(ranks)) as server:
        tokens, _ = ask(server)
        wait_stored(server)
        assert reset() == {"status": "ok", "reset": ["device", "host"], "kept": ["storage"]}
        assert ask(server) == (tokens, CACHED)
        before = num_values(tmp_path / "kv")
        assert reset("?reset_external=true") == {"status": "ok", "reset": ["device", "host", "storage"], "kept": []}
        assert ask(server) == (tokens, 0)
        wait_stored(server, 2 * CACHED // 16)
        wait_until(lambda: num_values(tmp_path / "kv") == 2 * before, "as many values in the new namespace")
        reset()
        assert ask(server) == (tokens, CACHED), "of the new namespace"
        end(server)


FAULTS = [
    # what goes wrong in the stand-in of the vendor's store, tokens that are cached all the same
    ({"read": {"delay_s": 0.3}}, CACHED),
    ({"read": {"short": 5, "times": 1}}, 5 * 16),
    ({"match": {"error": "no route to host", "times": 1}}, 0),
    ({"match": {"answer": -1, "times": 1}}, 0),
    ({"write": {"short": 3}}, CACHED),
    ({"write": {"error": "no space", "times": 1}}, CACHED),
    ({"read": {"error": "timed out", "late_s": 4.0, "times": 1}}, 0),
]


def test_faults_cost_hits_and_no_token(tmp_path):
    """The last one keeps blocks, while bytes go on arriving in them."""
    store = tmp_path / "kv"
    words, variables = STORES["attention_store"](store)
    with started(tmp_path / "server", *words, environment=variables) as server:
        tokens, _ = ask(server)
        wait_stored(server)
        for faults, cached in [*FAULTS, *[({}, None)] * 4]:
            httpx2.post(f"{server.url}/reset_prefix_cache", timeout=30.0).raise_for_status()
            wait_until(lambda: server.metrics()["storage_is_left_alone"] == 0, "a store that is asked")
            if "match" in faults:  # a write asks, too, and would meet the fault in place of the request
                wait_until(lambda: server.check()["storage_idle"], "the end of what is stored")
            set_faults(store, **faults)
            found = ask(server)
            assert found == (tokens, cached if faults else found[1]), faults
        wait_until(lambda: server.metrics()["device_loading_blocks"] == 0, "the end of failed calls", 90.0)
        end(server)


def test_explain_names_a_store_that_fails(tmp_path, capsys):
    store = tmp_path / "kv"
    words, variables = STORES["attention_store"](store)
    with started(tmp_path / "server", *words, environment=variables) as server:
        set_faults(store, match={"error": "no route to host"})
        for number in range(4):
            ask(server, prompt(number))
        wait_until(lambda: server.metrics()["storage_is_left_alone"] == 1, "a store that is left alone")
        assert cli.main(["explain", "--url", server.url]) == 1
        text = " ".join(capsys.readouterr().out.split())
        assert "1. 0.0% store_down: The store is left alone after repeated failures" in text
        assert "Do: Check that the store runs" in text
        end(server)


def test_a_wrong_bit_in_a_stored_value_changes_the_answer(tmp_path):
    """In the vendor's store, which has no digest of ours. A file's digest refuses such a value: a miss, no wrong token
    (`tests/storage/test_seal.py`).
    """
    words, variables = STORES["attention_store"](tmp_path / "kv")
    first_block = hashlib.sha256(json.dumps(PROMPT[:16]).encode()).hexdigest()
    with started(tmp_path / "server", *words, environment=variables) as server:
        tokens, _ = ask(server)
        wait_stored(server)
        (path,) = (tmp_path / "kv").glob(f"*of*/{first_block}")
        value = bytearray(path.read_bytes())
        for bit in (0, 1):
            value[len(value) // 2] ^= bit
            path.write_bytes(value)
            httpx2.post(f"{server.url}/reset_prefix_cache", timeout=30.0).raise_for_status()
            found, cached = ask(server)
            assert (found != tokens, cached) == (bool(bit), CACHED)
        end(server)


def test_servers_killed_while_storing_leave_a_usable_directory(tmp_path, capsys):
    """At a random moment, first the worker and then a whole server. `tests/storage/file` does it a hundred times to
    processes that do nothing but store.
    """
    directory, rng = tmp_path / "kv", random.Random(11)
    for number in (0, 2):
        with started(tmp_path / f"server-{number}", *file_flags(directory)) as server, ThreadPoolExecutor() as pool:
            ask(server, prompt(number))
            wait_stored(server)
            before = num_values(directory)
            answer = pool.submit(ask, server, prompt(number + 1))
            wait_until(lambda before=before: num_values(directory) > before, "a value of the next prompt")
            time.sleep(rng.uniform(0.0, 0.02))
            (server.process if number else server.worker).send_signal(signal.SIGKILL)
            server.wait_exit()
            answer.exception()
    assert cli.main(["storage", "verify", "--kvcache-storage-dir", str(directory)]) == 0, capsys.readouterr().out
    with started(tmp_path / "last", *file_flags(directory)) as server:
        found = [ask(server, prompt(number)) for number in range(4)]
        assert [cached for _, cached in found[::2]] == [CACHED] * 2, "stored before its server was killed"
        assert cli.main(["storage", "clear", "--kvcache-storage-dir", str(directory)]) == 0
        httpx2.post(f"{server.url}/reset_prefix_cache", timeout=30.0).raise_for_status()
        assert [ask(server, prompt(number)) for number in range(4)] == [(tokens, 0) for tokens, _ in found]
        end(server)
