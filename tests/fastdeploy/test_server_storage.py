"""The real server with a store: what one computed, the next one and the other one do not compute again."""

import json
from contextlib import contextmanager
from dataclasses import dataclass

import openai
import pytest

from fastdeploy_kvcache_v1.storage.file.value_files import stored_files
from tests.mooncake_master import Master, needs_mooncake
from tests.storage.attention_store.stand_in import environment as sdk
from tests.storage.attention_store.stand_in import num_stored, set_faults

from .cpu_server import BLOCK_SIZE, Answer, started, wait_until
from .server_workload import noise, user

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(1200)]

BLOCKS = 6
PROMPT, OTHER = (user(noise(seed, BLOCKS * BLOCK_SIZE)) for seed in (1, 2))
SMALL = user("go on")
CACHED = BLOCKS * BLOCK_SIZE
"""The template adds some tokens, so that the text fills its blocks."""


def flags(directory, **changes):
    settings = {
        "--swap-space": "0.01",
        "--write-policy": "write_through",
        "--kvcache-storage-backend": "file",
        "--kvcache-storage-dir": str(directory),
        "--storage-prefetch": "wait_complete",
        **changes,
    }
    return [word for pair in settings.items() for word in pair]


@contextmanager
def serving(release, tmp_path, name, *words, environment=None):
    """A server and a client; the server ends well."""
    with started(release, tmp_path / name, *words, environment=environment) as server, server.client() as client:
        yield server, client
        assert server.failed_copies() == 0
        assert server.stop() == 0, server.stderr


def counts(server):
    """Of the storage tier, by name."""
    return {name: value for name, value in server.metrics().items() if name.startswith("storage")}


def wait_stored(server, client, blocks):
    """Blocks reach the host, and so the store, with the batches after the one that computes them."""

    def is_stored():
        server.ask(client, SMALL, max_tokens=1)
        return counts(server).get("storage_blocks_total", 0) >= blocks

    wait_until(is_stored, lambda: f"{blocks} blocks to be stored: {counts(server)}", 120.0)


@dataclass
class Shared:
    """What two servers left that ran side by side over one store."""

    answers: tuple[Answer, Answer]
    """To `PROMPT` from the first one, to `OTHER` from the second one, which computed them."""
    seen: tuple[Answer, Answer]
    """The same questions, asked of the other one afterwards."""


def share(release, tmp_path, words, environment=None):
    with (
        serving(release, tmp_path, "one", *words, environment=environment) as (one, ask_one),
        serving(release, tmp_path, "two", *words, environment=environment) as (two, ask_two),
    ):
        first = one.ask(ask_one, PROMPT)
        wait_stored(one, ask_one, BLOCKS)
        first_again = two.ask(ask_two, PROMPT)
        second = two.ask(ask_two, OTHER)
        wait_stored(two, ask_two, 2 * BLOCKS)  # loaded ones count as well
        second_again = one.ask(ask_one, OTHER)
    return Shared((first, second), (first_again, second_again))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("storage") / "kv"


@pytest.fixture(scope="module")
def shared(release, directory, tmp_path_factory):
    return share(release, tmp_path_factory.mktemp(release), flags(directory))


def assert_shared(shared):
    for computed, seen in zip(shared.answers, shared.seen, strict=True):
        assert computed.cached_tokens < BLOCK_SIZE
        assert (seen.tokens, seen.cached_tokens) == (computed.tokens, CACHED)


def test_two_servers_share_what_they_compute(shared):
    assert_shared(shared)


@needs_mooncake()
def test_two_servers_share_what_they_compute_through_mooncake(release, tmp_path):
    master = Master(tmp_path)
    try:
        words = [word for word in flags("", **{"--kvcache-storage-backend": "mooncake"}) if word]
        words.remove("--kvcache-storage-dir")
        assert_shared(share(release, tmp_path, words, master.environment()))
    finally:
        master.kill()


def test_after_a_restart_damaged_blocks_and_other_weights_cost_hits_and_no_token(release, tmp_path, directory, shared):
    first, second = shared.answers
    with serving(release, tmp_path, "third", *flags(directory)) as (server, client):
        again = server.ask(client, PROMPT)
        assert (again.tokens, again.cached_tokens) == (first.tokens, CACHED)
        for file in stored_files(directory):
            with open(file.path, "r+b") as content:
                content.seek(1000)
                content.write(b"damage")
        again = server.ask(client, OTHER)
        assert (again.tokens, again.cached_tokens) == (second.tokens, 0)
        assert counts(server)["storage_damaged_blocks_total"] == 1, "what comes behind a damaged block is not read"
        wait_stored(server, client, BLOCKS + 1)  # the one that was found out, and those that were loaded

        server.control("pause")
        server.control("update_weights")  # the same ones, but who knows
        server.control("resume")
        before = counts(server)
        again = server.ask(client, PROMPT)
        assert (again.tokens, again.cached_tokens) == (first.tokens, 0)
        after = counts(server)
        assert after["storage_queries_total"] > before["storage_queries_total"]
        assert after["storage_found_blocks_total"] == before["storage_found_blocks_total"]
        assert_tenants_never_meet(server, client, first)


def assert_tenants_never_meet(server, client, plain):
    """`plain` is the answer to `PROMPT`, which is cached."""

    def ask(**fields):
        answer = server.ask(client, PROMPT, extra_body=fields)
        assert answer.tokens == plain.tokens
        return answer.cached_tokens

    assert ask() == CACHED
    assert [ask(cache_salt=salt) for salt in ("a", "a", "b", "a")] == [0, CACHED, 0, CACHED]
    assert [ask(skip_writing_prefix_cache=True, cache_salt="c") for _ in range(2)] == [0, 0]
    assert [ask(skip_reading_prefix_cache=True), ask()] == [0, CACHED]
    with pytest.raises(openai.APIStatusError, match="cache_salt") as refused:
        ask(cache_salt="")
    assert 400 <= refused.value.status_code < 500


# ---- the stand-in of the vendor's SDK: device blocks outlive the process, whatever the SDK does

ATTENTION = ("--kvcache-storage-backend", "attention_store", "--storage-prefetch", "wait_complete")
FEW_BLOCKS = ("--num-gpu-blocks-override", "40")
OTHERS = [user(noise(seed, BLOCKS * BLOCK_SIZE)) for seed in range(10, 17)]


@pytest.fixture(scope="module")
def store(release, tmp_path_factory):
    return tmp_path_factory.mktemp("attention") / "store"


@pytest.fixture(scope="module")
def computed(release, store, tmp_path_factory):
    """The answer to `PROMPT`, whose blocks are stored when the server has ended."""
    directory = tmp_path_factory.mktemp(release)
    with serving(release, directory, "first", *ATTENTION, environment=sdk(store)) as (server, client):
        answer = server.ask(client, PROMPT)
        wait_until(lambda: num_stored(store) >= BLOCKS, lambda: f"stored blocks: {counts(server)}", 60.0)
    return answer


def no_longer_cached(server, client):
    """Pause empties the device tier. What was stored before is found afterwards: the weights are the same."""
    server.control("pause")
    server.control("resume")


def test_a_restarted_server_loads_what_is_stored_and_faults_cost_hits_and_no_token(release, tmp_path, store, computed):
    words = (*ATTENTION, *FEW_BLOCKS)
    with serving(release, tmp_path, "second", *words, environment=sdk(store)) as (server, client):
        again = server.ask(client, PROMPT)
        assert (again.tokens, again.cached_tokens) == (computed.tokens, CACHED)
        assert counts(server)["storage_blocks_total"] == BLOCKS
        for faults, cached in (
            ({"read": {"delay_s": 0.3}}, CACHED),
            ({"read": {"short": 5, "times": 1}}, 5 * BLOCK_SIZE),
            ({"match": {"error": "no route to host", "times": 1}}, 0),
            ({"read": {"error": "timed out", "late_s": 20.0, "times": 1}}, 0),
        ):
            no_longer_cached(server, client)
            set_faults(store, **faults)
            again = server.ask(client, PROMPT)
            assert (again.tokens, again.cached_tokens) == (computed.tokens, cached), faults
        assert server.metrics()["quarantined_blocks"] == BLOCKS
        set_faults(store)
        for prompt in OTHERS:  # they need the other blocks of the tier, and none that the failed call may still fill
            server.ask(client, prompt)
        assert server.ask(client, PROMPT).tokens == computed.tokens
        wait_until(lambda: server.metrics()["quarantined_blocks"] == 0, "the end of the failed call", 90.0)


def index_of(store):
    """Paths of blocks that the index has, replayed."""
    paths = set()
    for line in (store / "index.jsonl").read_text().splitlines():
        _, tokens, first, before, now = json.loads(line)
        assert (before is None) != (now is None)
        blocks = {tuple(tokens[: end + BLOCK_SIZE]) for end in range(BLOCK_SIZE * first, len(tokens), BLOCK_SIZE)}
        paths = paths | blocks if now is not None else paths - blocks
    return paths


def test_flush_only_moves_no_data_and_says_what_the_server_has(release, tmp_path):
    store = tmp_path / "store"
    variables = {**sdk(store), "FD_AS_ONLY_FLUSH": "1"}
    with serving(release, tmp_path, "server", *ATTENTION, *FEW_BLOCKS, environment=variables) as (server, client):
        server.ask(client, PROMPT)
        wait_until(lambda: counts(server)["storage_flushes_total"] >= 1, "a statement, without another request")
        first = index_of(store)
        assert len(first) == BLOCKS
        for prompt in OTHERS:
            server.ask(client, prompt)
        wait_until(lambda: not first <= index_of(store), "what was evicted to leave the index")
        assert num_stored(store) == 0
        assert counts(server)["storage_blocks_total"] == 0
