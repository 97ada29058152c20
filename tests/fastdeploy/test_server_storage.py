"""The real server with a store: what one computed, the next one and the other one do not compute again."""

import json
import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import openai
import psutil
import pytest

from fastdeploy_kvcache_v1.storage.file.value_files import stored_files
from tests.mooncake_master import Master, needs_mooncake
from tests.storage.added_store import install_mine
from tests.storage.attention_store.stand_in import environment as sdk
from tests.storage.attention_store.stand_in import num_stored, set_faults

from .cpu_server import BLOCK_SIZE, NONE, ask, started, wait_until
from .models import LATENT
from .server_workload import Workload, expected_of, noise

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(1200)]

BLOCKS = 6
PROMPT, OTHER = (noise(seed, BLOCKS * BLOCK_SIZE) for seed in (1, 2))
CACHED = BLOCKS * BLOCK_SIZE
"""The template adds some tokens, so that the text fills its blocks."""

FEW_BLOCKS = ("--num-gpu-blocks-override", "40")
TIER = ("--swap-space", "0.01", "--write-policy", "write_through", "--storage-prefetch", "wait_complete")


def file_store(directory):
    return (*TIER, "--kvcache-storage-backend", "file", "--kvcache-storage-dir", str(directory))


@contextmanager
def serving(*given, **options):
    """As `started`; no copy fails."""
    with started(*given, **options) as (server, client):
        yield server, client
        assert server.failed_copies() == 0


def counts(server, engine=0):
    """Of the storage tier, by name."""
    return {name: value for name, value in server.metrics(engine).items() if name.startswith("storage")}


def wait_stored(server, client, blocks, engine=0):
    """Blocks reach the host, and so the store, with the batches after the one that computes them."""

    def is_stored():
        ask(client, "go on", max_tokens=1)
        return counts(server, engine).get("storage_blocks_total", 0) >= blocks

    wait_until(is_stored, lambda: f"{blocks} blocks to be stored: {counts(server, engine)}", 120.0)


def assert_shared(release, tmp_path, words, environment=NONE):
    """Two servers side by side over one store: each finds what the other one computed. Returns what they answered."""
    with (
        serving(release, tmp_path / "one", *words, environment=environment) as one,
        serving(release, tmp_path / "two", *words, environment=environment) as two,
    ):
        first = ask(one[1], PROMPT)
        wait_stored(*one, BLOCKS)
        first_again, second = ask(two[1], PROMPT), ask(two[1], OTHER)
        wait_stored(*two, 2 * BLOCKS)  # loaded ones count as well
        second_again = ask(one[1], OTHER)
    for computed, seen in (first, first_again), (second, second_again):
        assert computed.cached_tokens < BLOCK_SIZE
        assert (seen.tokens, seen.cached_tokens) == (computed.tokens, CACHED)
    return first, second


@needs_mooncake()
def test_two_servers_share_what_they_compute_through_mooncake(release, tmp_path):
    master = Master(tmp_path)
    try:
        assert_shared(release, tmp_path, (*TIER, "--kvcache-storage-backend", "mooncake"), master.environment())
    finally:
        master.kill()


def test_shared_store_outlives_servers_and_damage_costs_only_hits(release, tmp_path):
    directory = tmp_path / "kv"
    first, second = assert_shared(release, tmp_path, file_store(directory))
    with serving(release, tmp_path / "third", *file_store(directory)) as (server, client):
        again = ask(client, PROMPT)
        assert (again.tokens, again.cached_tokens) == (first.tokens, CACHED)
        for file in stored_files(directory):
            with open(file.path, "r+b") as content:
                content.seek(1000)
                content.write(b"damage")
        again = ask(client, OTHER)
        assert (again.tokens, again.cached_tokens) == (second.tokens, 0)
        wait_until(lambda: counts(server)["storage_damaged_blocks_total"], lambda: f"the damage: {counts(server)}")
        assert counts(server)["storage_damaged_blocks_total"] == 1, "what comes behind a damaged block is not read"
        wait_stored(server, client, BLOCKS + 1)  # the one that was found out, and those that were loaded

        server.control("pause")
        server.control("update_weights")  # the same ones, but who knows
        server.control("resume")
        before = counts(server)
        again = ask(client, PROMPT)
        assert (again.tokens, again.cached_tokens) == (first.tokens, 0)
        wait_until(lambda: counts(server)["storage_queries_total"] > before["storage_queries_total"], "a question")
        assert counts(server)["storage_found_blocks_total"] == before["storage_found_blocks_total"]
        wait_stored(server, client, before["storage_blocks_total"] + BLOCKS)
        for ends, cached in (("resume", CACHED), ("wakeup", 0)):  # nothing sleeps: only what was stored is forgotten
            server.control("pause")
            server.control(ends, **({"tags": "kv_cache"} if ends == "wakeup" else {}))
            again = ask(client, PROMPT)
            assert (again.tokens, again.cached_tokens) == (first.tokens, cached)
        assert_tenants_never_meet(client, first)


def test_installed_store_gets_its_flags_and_a_restart_finds_its_blocks(release, tmp_path):
    install_mine(tmp_path, mine="STORE")
    words = (*TIER, "--kvcache-storage-backend", "mine", "--kvcache-mine-room", "5", "--kvcache-mine-key", "a key")
    environment = {"PYTHONPATH": str(tmp_path)}
    options = {"kvcache_mine_room": 5, "kvcache_mine_key": "a key"}
    answers, opened = [], set()
    for name in ("first", "again"):
        with serving(release, tmp_path / name, *words, environment=environment) as (server, client):
            answers.append(ask(client, PROMPT))
            wait_stored(server, client, BLOCKS)  # loaded ones count as well
            (store,) = server.stores()
            opened.add(f"{store.pid} {options}")
    computed, found = answers
    assert computed.cached_tokens < BLOCK_SIZE
    assert (found.tokens, found.cached_tokens) == (computed.tokens, CACHED)
    assert {*(tmp_path / "opened").read_text().splitlines()} == opened


TWO = ("--tensor-parallel-size", "2")


def test_ranks_of_a_latent_cache_store_each_block_once(release, tmp_path):
    """One rank's bytes, which both get back."""
    words = (*file_store(tmp_path / "kv"), *TWO)
    with serving(release, tmp_path / "server", *words, model=LATENT) as (server, client):
        computed = ask(client, PROMPT)
        wait_stored(server, client, BLOCKS)
        sizes = [file.num_bytes for file in stored_files(tmp_path / "kv")]
        assert len(sizes) == BLOCKS
        assert LATENT.block_bytes(ranks=2) < min(sizes) <= max(sizes) < 2 * LATENT.block_bytes(ranks=2)
        assert found_again(server, client, PROMPT, computed) == CACHED


def test_ranks_with_other_bytes_of_a_shared_part_are_told_apart(release, tmp_path):
    """And store a part each, in place of wrong tokens."""
    environment = {"PYTHONPATH": str(Path(__file__).parent / "shared_parts")}
    words = (*file_store(tmp_path / "kv"), *TWO)
    with serving(release, tmp_path / "server", *words, environment=environment) as (server, client):

        def is_told():
            ask(client, PROMPT, max_tokens=1)
            return "ranks hold different bytes of a block" in (server.logs / "api_server.out").read_text()

        wait_until(is_told, "a warning", 60.0)
        computed = ask(client, OTHER)
        wait_stored(server, client, BLOCKS)  # perhaps of `PROMPT`
        wait_until(lambda: found_again(server, client, OTHER, computed) == CACHED, "what is stored now", 60.0)
        assert len([*stored_files(tmp_path / "kv")]) >= 2 * BLOCKS


def found_again(server, client, prompt, computed):
    """Cached tokens, all from the store."""
    server.control("pause")  # it empties both tiers
    server.control("resume")
    again = ask(client, prompt)
    assert again.tokens == computed.tokens
    return again.cached_tokens


def rounds(workload):
    workload.documents()
    workload.conversations()


def test_data_parallel_engines_share_a_store_and_a_restart_finds_it(release, tmp_path):
    """Each with its own API server, worker rank and store process."""
    expected = expected_of(release, part=rounds)
    words = (*file_store(tmp_path / "kv"), *FEW_BLOCKS)
    with serving(release, tmp_path / "first", *words, engines=2) as (server, client), server.client(1) as other:
        assert len({each.ppid() for each in server.stores()}) == len(server.stores()) == 2
        first, second = ask(client, PROMPT), ask(other, OTHER)
        wait_stored(server, client, BLOCKS)
        wait_stored(server, other, BLOCKS, engine=1)
        for computed, again in (first, ask(other, PROMPT)), (second, ask(client, OTHER)):
            assert computed.cached_tokens < BLOCK_SIZE
            assert (again.tokens, again.cached_tokens) == (computed.tokens, CACHED)
        workloads = [Workload(client), Workload(other)]
        with ThreadPoolExecutor(2) as pool:
            [*pool.map(rounds, workloads)]
        for rank, workload in enumerate(workloads):
            workload.assert_tokens_of(expected)
            assert server.worker_copies(rank).swap_in.blocks > 0
            assert server.failed_copies(rank) == 0
    with serving(release, tmp_path / "again", *words, engines=2) as (server, client), server.client(1) as other:
        for computed, again in (first, ask(other, PROMPT)), (second, ask(client, OTHER)):
            assert (again.tokens, again.cached_tokens) == (computed.tokens, CACHED)


@contextmanager
def store_process_in_trouble(server):
    """It is killed at random moments, or stopped: its engine ends it after a deadline, unless it is killed before.
    Yields which process got which signal.
    """
    rng, done, is_over = random.Random(5), [], threading.Event()

    def harm():
        while not is_over.wait(rng.uniform(0.2, rng.choice([2.0, 12.0]))):
            with suppress(psutil.Error):
                for process in server.stores():
                    if (process.pid, signal.SIGSTOP) not in done or rng.random() < 0.1:
                        number = rng.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP])
                        process.send_signal(number)
                        done.append((process.pid, number))

    thread = threading.Thread(target=harm)
    thread.start()
    try:
        yield done
    finally:
        is_over.set()
        thread.join()


TROUBLES = int(os.environ.get("KVCACHE_TEST_TROUBLES", "4"))
"""Store processes that get into trouble: 60 for a soak."""


@pytest.mark.timeout(1200 + 60 * TROUBLES)
def test_a_store_process_in_trouble_costs_hits_and_no_token(release, tmp_path):
    """Under traffic that goes on: both tiers together hold less than a round needs."""
    expected = expected_of(release, part=rounds)
    words = (*file_store(tmp_path / "kv"), "--num-gpu-blocks-override", "24", "--swap-space", "0.002")
    with serving(release, tmp_path / "server", *words) as (server, client):
        with store_process_in_trouble(server) as done:
            workload = Workload(client)
            while len({number for _, number in done}) < 2 or len(dict(done)) < TROUBLES:
                rounds(workload)
                workload.assert_tokens_of(expected)
        idle = lambda: server.metrics()["host_loading_blocks"] == 0  # noqa: E731  published now and then
        wait_until(idle, "slots that loads had", 60.0)
        first = ask(client, PROMPT)
        before = counts(server)["storage_blocks_total"]
        wait_stored(server, client, before + BLOCKS)  # another process serves
        assert ask(client, PROMPT).tokens == first.tokens


def long_answers(workload):
    """Eight at once: 40 blocks are room for six of them at first, and for three in the end."""

    def one(index):
        return workload.send(noise(200 + index, 310), max_tokens=440, extra_body={"min_tokens": 440})

    with ThreadPoolExecutor(8) as pool:
        for index, answer in enumerate(pool.map(one, range(16))):
            workload.answers[f"long {index}"] = answer


TAKES_ALL = {
    "FD_RESERVE_OUTPUT_BLOCK_NUM_FOR_DECODE_WHEN_SCHEDULE_NEW_PREFILL": "0",
    "FD_USE_NEW_TOKEN_RATIO_RESERVE": "0",
}
"""FastDeploy starts what has room now, and preempts what has none later."""


def test_preempted_requests_are_asked_for_in_the_store_again(release, tmp_path):
    """No two prompts are alike: what is found was stored before its request was preempted."""
    expected = expected_of(release, part=long_answers)
    words = (*file_store(tmp_path / "kv"), *FEW_BLOCKS, "--swap-space", "0.001")
    with serving(release, tmp_path / "server", *words, environment=TAKES_ALL) as (server, client):
        workload = Workload(client)
        long_answers(workload)
        workload.assert_tokens_of(expected)
        said = (server.logs / "fastdeploy.log").read_text(errors="replace")
        assert "Preemption is triggered" in said
        found = lambda: counts(server)["storage_found_blocks_total"]  # noqa: E731  published now and then
        wait_until(found, lambda: f"stored blocks of preempted requests: {counts(server)}")


def assert_tenants_never_meet(client, plain):
    """`plain` is the answer to `PROMPT`, which is cached."""

    def cached(**fields):
        answer = ask(client, PROMPT, extra_body=fields)
        assert answer.tokens == plain.tokens
        return answer.cached_tokens

    assert cached() == CACHED
    assert [cached(cache_salt=salt) for salt in ("a", "a", "b", "a")] == [0, CACHED, 0, CACHED]
    assert [cached(skip_writing_prefix_cache=True, cache_salt="c") for _ in range(2)] == [0, 0]
    assert [cached(skip_reading_prefix_cache=True), cached()] == [0, CACHED]
    assert [cached(disable_prefix_caching=True, cache_salt="d"), cached(cache_salt="d")] == [0, 0]
    assert [cached(disable_prefix_caching=True), cached(disable_prefix_caching=False)] == [0, CACHED]
    with pytest.raises(openai.APIStatusError, match="cache_salt") as refused:
        cached(cache_salt="")
    assert 400 <= refused.value.status_code < 500


# ---- the stand-in of the vendor's SDK: device blocks outlive the process, whatever the SDK does

ATTENTION = ("--kvcache-storage-backend", "attention_store", "--storage-prefetch", "wait_complete")
OTHERS = [noise(seed, BLOCKS * BLOCK_SIZE) for seed in range(10, 17)]


def test_restarted_server_loads_stored_blocks_and_faults_cost_only_hits(release, tmp_path):
    store = tmp_path / "store"
    with serving(release, tmp_path / "first", *ATTENTION, environment=sdk(store)) as (server, client):
        computed = ask(client, PROMPT)
        wait_until(lambda: num_stored(store) >= BLOCKS, lambda: f"stored blocks: {counts(server)}", 60.0)
    with serving(release, tmp_path / "second", *ATTENTION, *FEW_BLOCKS, environment=sdk(store)) as (server, client):
        again = ask(client, PROMPT)
        assert (again.tokens, again.cached_tokens) == (computed.tokens, CACHED)
        loaded = lambda: counts(server)["storage_blocks_total"]  # noqa: E731  published now and then
        wait_until(lambda: loaded() == BLOCKS, "the blocks that the answer used")
        for faults, cached in (
            ({"read": {"delay_s": 0.3}}, CACHED),
            ({"read": {"short": 5, "times": 1}}, 5 * BLOCK_SIZE),
            ({"match": {"error": "no route to host", "times": 1}}, 0),
            ({"read": {"error": "timed out", "late_s": 20.0, "times": 1}}, 0),
        ):
            server.control("pause")  # it empties the device tier; the weights are the same
            server.control("resume")
            set_faults(store, **faults)
            again = ask(client, PROMPT)
            assert (again.tokens, again.cached_tokens) == (computed.tokens, cached), faults
        kept = lambda: server.metrics()["device_loading_blocks"]  # noqa: E731  published now and then
        wait_until(lambda: kept() == BLOCKS, "the blocks that the failed call may still fill", 15.0)
        set_faults(store)
        for prompt in OTHERS:  # they need the other blocks of the tier, and none that the failed call may still fill
            ask(client, prompt)
        assert ask(client, PROMPT).tokens == computed.tokens
        wait_until(lambda: kept() == 0, "the end of the failed call", 90.0)


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
    with serving(release, tmp_path / "server", *ATTENTION, *FEW_BLOCKS, environment=variables) as (server, client):
        ask(client, PROMPT)
        wait_until(lambda: counts(server)["storage_flushes_total"] >= 1, "a statement, without another request")
        first = index_of(store)
        assert len(first) == BLOCKS
        for prompt in OTHERS:
            ask(client, prompt)
        wait_until(lambda: not first <= index_of(store), "what was evicted to leave the index")
        assert num_stored(store) == 0
        assert counts(server)["storage_blocks_total"] == 0
