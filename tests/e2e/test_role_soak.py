"""Requests from eight clients while servers are killed, stopped and started again. `FASTDEPLOY_KVCACHE_SOAK=1000` sets
how many; the suite sends a few.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from tests.e2e.peer_servers import PATIENCE_S, Cluster, cluster
from tests.e2e.server_process import ServerProcess, started

pytestmark = pytest.mark.process

NUM_REQUESTS = int(os.environ.get("FASTDEPLOY_KVCACHE_SOAK", "60"))
NUM_CLIENTS = 8
NUM_PROMPTS = 24
REQUESTS_PER_FAULT = 25
FLAGS = (
    *("--block-size", "8", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"),
    *("--num-gpu-blocks-override", "160", "--swap-space", "0.02", "--max-model-len", "600"),
)


def body_of(number: int) -> dict[str, Any]:
    """Prompts with shared prefixes."""
    rng = random.Random(number % 5)
    prefix = [rng.randrange(1, 250) for _ in range(150)]
    rng = random.Random(1000 + number)
    prompt = prefix[: rng.randrange(20, 150)] + [rng.randrange(1, 250) for _ in range(rng.randrange(5, 300))]
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.8, "seed": number}
    return {"prompt": prompt, "max_tokens": 10, "ignore_eos": True, "return_token_ids": True, **sampling}


def tokens_of(url: str, number: int, timeout_s: float = 120.0) -> list[int] | None:
    """None when no decode server finished the request: a fault for one, and the next fault for the other."""
    answer = httpx2.post(f"{url}/v1/completions", json=body_of(number), timeout=timeout_s)
    if answer.status_code in (502, 503):
        assert "no decode server" in answer.json()["error"]["message"]
        return None
    assert answer.status_code == 200, answer.text
    tokens: list[int] = answer.json()["choices"][0]["token_ids"]
    return tokens


class Faults:
    """One server at a time is killed and started again, or stopped and let go on."""

    def __init__(self, servers: Cluster, rng: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self._servers = servers
        self._rng = rng
        self._lock = threading.Lock()

    def strike(self) -> None:
        """Returns at once if another fault is not over."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            name = self._rng.choice(sorted(self._servers.servers))
            server = self._servers.servers[name]
            pids = (server.worker.pid, server.process.pid)
            kind = self._rng.choice(["kill", "stop", "stop the worker"])
            self.counts[f"{kind} {name[:-1]}"] += 1
            if kind == "kill":
                self._restart(name, server)
            else:
                stopped = pids if kind == "stop" else pids[:1]
                for pid in stopped:
                    os.kill(pid, signal.SIGSTOP)
                # Longer than any peer waits.
                threading.Event().wait(self._rng.choice([0.5, 6.0]))
                for pid in stopped:
                    os.kill(pid, signal.SIGCONT)
            self._servers.wait_alive(*self._servers.servers)
        finally:
            self._lock.release()

    def _restart(self, name: str, server: ServerProcess) -> None:
        port = server.url.rpartition(":")[2]
        server.kill()
        self._servers.start(name, "--port", port).wait_ready(PATIENCE_S)


@pytest.mark.timeout(900 + 4 * NUM_REQUESTS)
def test_requests_survive_random_faults_and_nothing_is_left(tmp_path):
    rng = random.Random(11)
    with started(tmp_path / "mixed", *FLAGS) as mixed:
        expected = {number: tokens_of(mixed.url, number) for number in range(NUM_PROMPTS)}
    outcomes: Counter[str] = Counter()
    with cluster(tmp_path / "roles", *FLAGS, num_prefill=2, num_decode=2) as servers:
        faults = Faults(servers, rng)

        def request(place: int) -> None:
            number = random.Random(place).randrange(NUM_PROMPTS)
            if place % REQUESTS_PER_FAULT == REQUESTS_PER_FAULT // 2:
                faults.strike()
            if place % 7 == 3:  # a client without patience
                with contextlib.suppress(httpx2.TimeoutException):
                    tokens_of(servers.router.url, number, timeout_s=place % 11 * 0.05 + 0.01)
                outcomes["left"] += 1
            else:
                tokens = tokens_of(servers.router.url, number)
                assert tokens in (None, expected[number])
                outcomes["right" if tokens else "failed"] += 1

        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            list(pool.map(request, range(NUM_REQUESTS)))
        servers.wait_alive(*servers.servers)
        servers.assert_idle()
        arrived = servers.total("decode", "transfers_ended_total{outcome=arrived,side=decode}")
        recomputed = servers.total("decode", "prompts_recomputed_total")
        print(f"{dict(outcomes)}, faults {dict(faults.counts)}, {arrived:.0f} arrived, {recomputed:.0f} recomputed")
        assert faults.counts.total() > 0
        assert outcomes.total() == NUM_REQUESTS
        assert outcomes["failed"] <= faults.counts.total() * NUM_CLIENTS / 2
        assert arrived > 0
