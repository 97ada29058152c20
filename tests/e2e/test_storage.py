"""Real servers with a storage directory: what one computed, the next one and the other one do not compute again."""

import random
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from fastdeploy_kvcache_v1 import cli
from fastdeploy_kvcache_v1.storage.file.value_files import namespaces, stored_files
from fastdeploy_kvcache_v1.storage.namespace import FORMAT_VERSION
from tests.e2e.server_process import OPERATOR, refusal, started, wait_until
from tests.model.model_dirs import BASE, byte_level_tokenizer, random_tensors, write_model

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


def test_servers_that_are_killed_while_they_store_leave_a_directory_that_works(tmp_path, capsys):
    """At a random moment, first the worker and then a whole server. `tests/storage/file` does it a hundred times to
    processes that do nothing but store.
    """
    directory, rng = tmp_path / "kv", random.Random(11)
    for number in (0, 2):
        with started(tmp_path / f"server-{number}", *flags(directory)) as server, ThreadPoolExecutor() as pool:
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
    with started(tmp_path / "last", *flags(directory)) as server:
        found = [ask(server, prompt(number)) for number in range(4)]
        assert [cached for _, cached in found[::2]] == [CACHED] * 2, "stored before its server was killed"
        assert cli.main(["storage", "clear", "--kvcache-storage-dir", str(directory)]) == 0
        httpx.post(f"{server.url}/reset_prefix_cache", headers=OPERATOR, timeout=30.0).raise_for_status()
        assert [ask(server, prompt(number)) for number in range(4)] == [(tokens, 0) for tokens, _ in found]
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


def test_two_models_of_one_shape_in_one_directory_never_meet(tmp_path):
    directory = tmp_path / "kv"
    answers = []
    for seed in range(2):
        model = write_model(tmp_path / f"model-{seed}", random_tensors(BASE, seed), BASE)
        byte_level_tokenizer().save(str(model / "tokenizer.json"))
        own = ("--model", str(model), "--max-model-len", "512")
        with started(tmp_path / f"server-{seed}", *flags(directory), *own) as server:
            tokens, cached = ask(server, PROMPT[:400])
            assert cached == 0
            assert server.metrics()["storage_found_blocks_total"] == 0
            wait_stored(server, 24)
            answers.append(tokens)
            end(server)
    assert answers[0] != answers[1]
    assert len(namespaces(directory)) == 2


def changed_at(directory):
    return {path: path.lstat().st_ctime_ns for path in (directory, *directory.rglob("*"))}


@pytest.mark.parametrize("version", [FORMAT_VERSION - 1, FORMAT_VERSION + 1], ids=["older", "newer"])
def test_a_directory_of_another_format_is_refused_by_all_and_left_as_it_is(tmp_path, version, capsys):
    directory = tmp_path / "kv"
    value = directory / ("0" * 32) / "ab" / "abcd.0"
    value.parent.mkdir(parents=True)
    value.write_text("of another format")
    (directory / "format").write_text(f"fastdeploy-kvcache-v1 storage {version}\n")
    before = changed_at(directory)
    line = f"was written by another version ('fastdeploy-kvcache-v1 storage {version}'"
    assert line in refusal(capsys, *flags(directory))
    for action in (["info"], ["verify", "--repair"], ["prune", "--to-gib", "0"], ["clear"]):
        assert cli.main(["storage", *action, "--kvcache-storage-dir", str(directory)]) == 2
        error = capsys.readouterr().err
        assert (error.count("\n"), line in error) == (1, True), error
    assert cli.main(["doctor", "--kvcache-storage-dir", str(directory)]) == 1
    (found,) = (each for each in capsys.readouterr().out.splitlines() if "storage file" in each)
    assert (found.startswith("FAIL"), line in found) == (True, True), found
    assert changed_at(directory) == before


def test_a_directory_that_vanishes_costs_hits_and_nothing_else(tmp_path, stored):
    directory, tokens = stored
    with started(tmp_path / "second", *flags(directory)) as server:
        shutil.rmtree(directory)
        assert ask(server) == (tokens, 0)
        assert ask(server) == (tokens, CACHED), "the tiers of the server itself"
        end(server)


def test_a_directory_that_cannot_be_used_is_one_line_at_the_start(tmp_path, capsys):
    (tmp_path / "letter.txt").write_text("Dear")
    assert "letter.txt" in refusal(capsys, *flags(tmp_path / "letter.txt"))
