"""Prefill and decode servers that are killed, stopped, restarted, or talked to through a network that lies."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import openai
import pytest

from tests.e2e.peer_servers import PATIENCE_S, Cluster, cluster
from tests.e2e.server_process import ServerProcess, started, wait_until
from tests.mooncake_master import needs_mooncake

pytestmark = [pytest.mark.process, pytest.mark.timeout(900)]
"""Each starts three or four servers, at times on a machine that is busy with other tests."""

FLAGS = ("--block-size", "8", "--max-num-seqs", "12", "--max-num-batched-tokens", "16", "--max-model-len", "4096")
LONG = 3000
"""Tokens of a prompt that takes some 190 steps: long enough to be seen in the middle of it."""


def prompt_of(seed: int, length: int = 200) -> list[int]:
    return [(seed * 7919 + place * (seed + 3)) % 250 + 1 for place in range(length)]


def ask(client: openai.OpenAI, seed: int, length: int = 200, max_tokens: int = 12) -> list[int]:
    answer = client.completions.create(
        model="default",
        prompt=prompt_of(seed, length),
        max_tokens=max_tokens,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    tokens: list[int] = answer.choices[0].token_ids  # type: ignore[attr-defined]
    return tokens


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    """`expected(seed, length)`: the tokens of a mixed server."""
    with started(tmp_path_factory.mktemp("mixed"), *FLAGS) as server, server.client() as client:
        known: dict[tuple[int, int], list[int]] = {}

        def tokens(seed: int, length: int = 200) -> list[int]:
            if (seed, length) not in known:
                known[seed, length] = ask(client, seed, length)
            return known[seed, length]

        yield tokens


def send(server: ServerProcess, number: int) -> None:
    """To the server and its worker: both belong to it."""
    worker = server.worker
    for pid in (worker.pid, server.process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def fetching(servers: Cluster) -> bool:
    return servers.total("decode", "transfer_open{side=decode}") > 0


class Asking:
    """A request on a thread of its own."""

    def __init__(self, servers: Cluster, seed: int, length: int) -> None:
        self.tokens: list[int] | None = None
        self.error: Exception | None = None
        self._arguments = (servers, seed, length)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        servers, seed, length = self._arguments
        try:
            with servers.router.client() as client:
                self.tokens = ask(client, seed, length)
        except openai.OpenAIError as error:
            self.error = error

    def result(self) -> list[int] | None:
        self._thread.join(100)
        assert not self._thread.is_alive(), "the request never ended"
        return self.tokens


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """One prefill server and two decode servers for faults in turn: each leaves all of them alive and idle."""
    with cluster(tmp_path_factory.mktemp("cluster"), *FLAGS, num_decode=2) as started_once:
        yield started_once


def bring_back(servers: Cluster, name: str, number: int) -> None:
    """The server that was sent `number`; behind the same port."""
    dead = servers.servers[name]
    if number == signal.SIGSTOP:
        send(dead, signal.SIGCONT)
    else:
        servers.start(name, "--port", dead.url.rpartition(":")[2]).wait_ready(PATIENCE_S)
    servers.wait_alive(*servers.servers)


@pytest.mark.parametrize(("number", "seed"), [(signal.SIGKILL, 10), (signal.SIGSTOP, 20)])
def test_a_prefill_server_that_dies_or_stops_costs_no_token_and_no_block(servers, expected, number, seed):
    """In the middle of a prompt; then without it, and with one that starts again behind the same ports."""
    recomputed = servers.total("decode", "prompts_recomputed_total")
    asking = Asking(servers, seed, LONG)
    wait_until(lambda: fetching(servers), "a fetch")
    send(servers.servers["prefill0"], number)
    assert asking.result() == expected(seed, LONG), asking.error
    assert servers.total("decode", "prompts_recomputed_total") == recomputed + 1
    servers.wait_alive("decode0", "decode1")
    with servers.router.client() as client:
        assert ask(client, seed + 1) == expected(seed + 1), "without a prefill server a decode server computes it"
    bring_back(servers, "prefill0", number)
    arrived = servers.total("decode", "transfers_ended_total{outcome=arrived,side=decode}")
    with servers.router.client() as client:
        assert ask(client, seed + 2) == expected(seed + 2)
    assert servers.total("decode", "transfers_ended_total{outcome=arrived,side=decode}") == arrived + 1
    servers.assert_idle()


def test_prefill_server_whose_worker_hangs_costs_one_wait_alone(servers, expected):
    """Its HTTP process lives and says so: heartbeats alone would let each request wait for `--transfer-wait`."""
    worker, prefill = servers.servers["prefill0"].worker, servers.servers["prefill0"].url
    asking = Asking(servers, 25, LONG)
    wait_until(lambda: fetching(servers), "a fetch")
    worker.suspend()
    assert asking.result() == expected(25, LONG), asking.error
    assert "has computed no layer" in httpx2.get(f"{prefill}/health").json()["error"]["message"]
    servers.wait_alive("decode0", "decode1")
    with servers.router.client() as client:
        assert ask(client, 26) == expected(26)
    worker.resume()
    servers.wait_alive(*servers.servers)
    with servers.router.client() as client:
        assert ask(client, 27) == expected(27)
    servers.assert_idle()


def test_decode_server_whose_worker_hangs_gets_no_more_requests(servers, expected):
    worker = servers.servers["decode0"].worker
    worker.suspend()
    asking = [Asking(servers, seed, 200) for seed in (28, 29)]  # one for each decode server
    servers.wait_alive("prefill0", "decode1")
    with servers.router.client() as client:
        assert ask(client, 27) == expected(27)
    worker.resume()
    for seed, each in zip((28, 29), asking, strict=True):
        assert each.result() == expected(seed), each.error
    servers.wait_alive(*servers.servers)
    servers.assert_idle()


@pytest.mark.parametrize(("number", "seed"), [(signal.SIGKILL, 30), (signal.SIGSTOP, 40)])
def test_prefill_server_ends_the_leases_of_a_dead_or_stopped_decode_server(servers, expected, number, seed):
    """Its request goes to the other decode server; its leases end."""
    asking = Asking(servers, seed, LONG)
    wait_until(lambda: fetching(servers), "a fetch")
    (name,) = [
        name
        for name, each in servers.servers.items()
        if name.startswith("decode") and each.metrics()["transfer_open{side=decode}"]
    ]
    send(servers.servers[name], number)
    assert asking.result() == expected(seed, LONG), asking.error
    wait_until(
        lambda: servers.total("prefill", "transfer_open{side=prefill}") == 0, "the prefill server's leases to end"
    )
    bring_back(servers, name, number)
    with servers.router.client() as client:
        assert ask(client, seed + 1) == expected(seed + 1)
    servers.assert_idle()


def test_clients_that_leave_get_everything_back_on_both_sides(servers, expected):
    with servers.router.client() as client, ThreadPoolExecutor(8) as pool:

        def leave(seed: int) -> None:
            with contextlib.suppress(httpx2.TimeoutException):
                httpx2.post(
                    f"{servers.router.url}/v1/completions",
                    json={"prompt": prompt_of(seed, 600), "max_tokens": 200, "ignore_eos": True},
                    timeout=httpx2.Timeout(0.02 + seed % 8 * 0.1, connect=20.0),
                )

        list(pool.map(leave, range(100, 132)))
        assert ask(client, 50) == expected(50)
    servers.assert_idle()


def test_a_router_that_is_killed_leaves_nothing(servers, expected):
    asking = Asking(servers, 60, LONG)
    wait_until(lambda: fetching(servers), "a fetch")
    servers.router.kill()
    assert asking.result() is None
    servers.assert_idle()
    servers.start_router()
    with servers.router.client() as client:
        assert ask(client, 60, LONG) == expected(60, LONG)
    servers.assert_idle()


def test_requests_that_no_router_sent_are_refused_or_served_here(servers, expected):
    prefill, decode = servers.servers["prefill0"], servers.servers["decode0"]
    body = {"prompt": prompt_of(70), "max_tokens": 2}
    header = {"X-KVCache-Prefill": "http://127.0.0.1:9", "X-KVCache-Proof": "0" * 64}
    for server, status in ((decode, 403), (prefill, 400)):
        answer = httpx2.post(f"{server.url}/v1/completions", json=body, headers=header, timeout=60)
        assert answer.status_code == status
        assert "X-KVCache-Prefill" in answer.json()["error"]["message"]
    answer = httpx2.post(f"{prefill.url}/kvcache/prefill", json={}, headers=header, timeout=60)
    assert answer.status_code == 403
    assert "same secret" in answer.json()["error"]["message"]
    with decode.client() as client:
        assert ask(client, 70) == expected(70)
    servers.assert_idle()


@needs_mooncake()
def test_the_mooncake_plane_moves_the_same_blocks(tmp_path, expected):
    """With a digest that both sides make, for this plane has no checksums."""
    with cluster(tmp_path, *FLAGS, "--transfer-plane", "mooncake") as servers:
        with servers.router.client() as client, ThreadPoolExecutor(4) as pool:
            outputs = list(pool.map(lambda seed: ask(client, seed), range(8)))
        assert outputs == [expected(seed) for seed in range(8)]
        assert servers.total("decode", "transfers_ended_total{outcome=arrived,side=decode}") == 8
        servers.assert_idle()
        servers.stop()
