"""Real servers with a storage directory: what one computed, the next one and the other one do not compute again."""

import shutil
import signal

import pytest

from fastdeploy_kvcache_v1.storage.file.value_files import stored_files
from tests.e2e.server_process import ServerProcess, started, wait_until

PROMPT = [1 + number % 250 for number in range(600)]
SIZE = ("--block-size", "16", "--num-gpu-blocks-override", "120", "--max-model-len", "900")
CACHED = 592
"""All whole blocks but the one of the last token."""


def flags(directory, **changes):
    settings = {
        "--swap-space": "0.02",
        "--write-policy": "write_through",
        "--kvcache-storage-backend": "file",
        "--kvcache-storage-dir": str(directory),
        "--storage-prefetch": "wait_complete",
        **changes,
    }
    return [*SIZE, *(word for pair in settings.items() for word in pair)]


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


@pytest.fixture
def stored(tmp_path):
    """A directory with the blocks of `PROMPT`, and the answer."""
    directory = tmp_path / "kv"
    with started(tmp_path / "first", *flags(directory)) as server:
        tokens, cached = ask(server)
        assert cached == 0
        wait_stored(server)
        end(server)
    return directory, tokens


def test_a_restarted_server_does_not_compute_again_what_is_stored(tmp_path, stored):
    directory, tokens = stored
    with started(tmp_path / "second", *flags(directory)) as server:
        assert ask(server) == (tokens, CACHED)
        metrics = server.metrics()
        assert metrics["storage_blocks_total{direction=load}"] == CACHED / 16
        latencies = {name: metrics[f"storage_latency_seconds_count{{operation={name}}}"] for name in ("query", "load")}
        assert latencies == {"query": 1, "load": 2}, "37 blocks, at most 32 in one load"
        assert metrics["storage_damaged_blocks_total"] == 0
        end(server)


def test_two_servers_share_what_they_compute(tmp_path):
    directory = tmp_path / "kv"
    with started(tmp_path / "one", *flags(directory)) as one, started(tmp_path / "two", *flags(directory)) as two:
        assert_they_share(one, two)
        end(one)
        end(two)


def test_a_killed_server_leaves_a_directory_that_works(tmp_path):
    directory = tmp_path / "kv"
    with started(tmp_path / "first", *flags(directory)) as server:
        tokens, _ = ask(server)
        wait_stored(server, 1)
        server.worker.send_signal(signal.SIGKILL)
        assert server.wait_exit() == 1
        server.assert_nothing_left()
    with started(tmp_path / "second", *flags(directory)) as server:
        again, cached = ask(server)
        assert again == tokens
        assert 0 < cached <= CACHED
        end(server)


def test_damaged_files_cost_hits_and_no_token(tmp_path, stored):
    directory, tokens = stored
    for number, file in enumerate(sorted(stored_files(directory), key=lambda file: file.path)):
        with open(file.path, "r+b") as content:
            if number % 3 == 0:
                content.seek(1000)
                content.write(b"damage")
            elif number % 3 == 1:
                content.truncate(1000)
    with started(tmp_path / "second", *flags(directory)) as server:
        again, cached = ask(server)
        assert again == tokens
        assert cached < CACHED
        assert server.metrics()["storage_damaged_blocks_total"] > 0
        end(server)


@pytest.mark.parametrize(
    "change",
    [
        {"--cache-dtype": "bfloat16"},
        {"--block-size": "32"},
    ],
)
def test_servers_with_other_blocks_do_not_meet(tmp_path, stored, change):
    directory, _ = stored
    with started(tmp_path / "second", *flags(directory, **change)) as server:
        assert ask(server)[1] == 0
        metrics = server.metrics()
        assert (metrics["storage_queries_total"], metrics["storage_found_blocks_total"]) == (1, 0)
        end(server)


def test_a_directory_that_vanishes_costs_hits_and_nothing_else(tmp_path, stored):
    directory, tokens = stored
    with started(tmp_path / "second", *flags(directory)) as server:
        shutil.rmtree(directory)
        assert ask(server) == (tokens, 0)
        assert ask(server) == (tokens, CACHED), "the tiers of the server itself"
        end(server)


def test_a_directory_that_cannot_be_used_is_one_line_at_the_start(tmp_path):
    (tmp_path / "letter.txt").write_text("Dear")
    server = ServerProcess(tmp_path / "server", *flags(tmp_path / "letter.txt"))
    try:
        assert server.wait_exit() == 2
        assert len(server.stderr.strip().splitlines()) == 1
        assert "letter.txt" in server.stderr
    finally:
        server.kill()
