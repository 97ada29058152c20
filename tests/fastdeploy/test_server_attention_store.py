"""The real server with the stand-in of the vendor's SDK: device blocks outlive the process, whatever the SDK does."""

import json

import pytest

from tests.storage.attention_store.stand_in import environment, num_stored, set_faults

from .cpu_server import BLOCK_SIZE, started, wait_until
from .server_workload import noise, user
from .test_server_storage import BLOCKS, CACHED, PROMPT, counts, serving

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(1200)]

FLAGS = ("--kvcache-storage-backend", "attention_store", "--storage-prefetch", "wait_complete")
FEW_BLOCKS = ("--num-gpu-blocks-override", "40")
OTHERS = [user(noise(seed, BLOCKS * BLOCK_SIZE)) for seed in range(10, 17)]


@pytest.fixture(scope="module")
def store(release, tmp_path_factory):
    return tmp_path_factory.mktemp("attention") / "store"


@pytest.fixture(scope="module")
def computed(release, store, tmp_path_factory):
    """The answer to `PROMPT`, whose blocks are stored when the server has ended."""
    directory = tmp_path_factory.mktemp(release)
    with serving(release, directory, "first", *FLAGS, environment=environment(store)) as (server, client):
        answer = server.ask(client, PROMPT)
        wait_until(lambda: num_stored(store) >= BLOCKS, lambda: f"stored blocks: {counts(server)}", 60.0)
    return answer


def no_longer_cached(server, client):
    """Pause empties the device tier. What was stored before is found afterwards: the weights are the same."""
    server.control("pause")
    server.control("resume")


def test_a_restarted_server_loads_what_is_stored_and_faults_cost_hits_and_no_token(release, tmp_path, store, computed):
    words = (*FLAGS, *FEW_BLOCKS)
    with serving(release, tmp_path, "second", *words, environment=environment(store)) as (server, client):
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
    variables = {**environment(store), "FD_AS_ONLY_FLUSH": "1"}
    with serving(release, tmp_path, "server", *FLAGS, *FEW_BLOCKS, environment=variables) as (server, client):
        server.ask(client, PROMPT)
        wait_until(lambda: counts(server)["storage_flushes_total"] >= 1, "a statement, without another request")
        first = index_of(store)
        assert len(first) == BLOCKS
        for prompt in OTHERS:
            server.ask(client, prompt)
        wait_until(lambda: not first <= index_of(store), "what was evicted to leave the index")
        assert num_stored(store) == 0
        assert counts(server)["storage_blocks_total"] == 0


@pytest.mark.parametrize(
    ("has_sdk", "reason"),
    [
        (False, "needs the package attentionstore_sdk, which is not installed"),
        (True, "attention_store cannot be used: the attention store cannot be used: licence expired"),
    ],
)
def test_a_store_that_cannot_be_used_ends_the_start_in_one_line(release, tmp_path, has_sdk, reason):
    store = tmp_path / "store"
    set_faults(store, match={"error": "licence expired"})
    variables = environment(store) if has_sdk else {}
    with pytest.raises(AssertionError, match=reason), started(release, tmp_path / "s", *FLAGS, environment=variables):
        pass
