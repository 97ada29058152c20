"""FastDeploy's own router with prefill and decode servers on CPU workers."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
from openai import OpenAI

from tests.e2e.server_process import openai_client
from tests.fault_proxy import Fault
from tests.mooncake_master import free_port

from . import cpu_server
from .cpu_server import CpuServer, wait_until
from .fastdeploy_trees import ROOT, tree
from .models import PLAIN, Model
from .server_workload import noise

PROXY = Path(__file__).parent / "data_proxy"
HOST = "127.0.0.1"
NUM_BLOCKS = 64
REGISTERED_TIMEOUT_S = 90.0
IDLE_TIMEOUT_S = 60.0

FORMS = [(endpoint, streams) for endpoint in ("chat/completions", "completions") for streams in (False, True)]
"""Of answers."""

LIMITS = '{"silence_s": 4, "wait_s": 12, "lease_s": 12}'
PROMPTS = [f"{'shared words ' * 20}question {number} {noise(number, number * 37 % 300)}" for number in range(12)]
PROMPTS += [noise(100, 600), "short", noise(101, 63)]


@dataclass
class Router:
    url: str
    address: str

    def num_registered(self) -> dict[str, int]:
        try:
            counts: dict[str, int] = httpx2.get(f"{self.url}/registered_number", timeout=5.0).json()
        except httpx2.HTTPError:
            return {}
        return counts

    def wait_registered(self, *, prefill: int, decode: int) -> None:
        def are_there() -> bool:
            counts = self.num_registered()
            return (counts.get("prefill"), counts.get("decode")) == (prefill, decode)

        wait_until(are_there, "the servers to register", REGISTERED_TIMEOUT_S)

    def client(self, *, timeout_s: float = 120.0) -> OpenAI:
        return openai_client(self.url, timeout_s=timeout_s)


@contextmanager
def router(release: str, directory: Path, port: int) -> Iterator[Router]:
    directory.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree(release)), str(ROOT)]),
        "FD_LOG_DIR": str(directory / "log"),
    }
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "fastdeploy.router.launch", "--host", HOST, "--port", str(port), "--splitwise"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
        )
    try:
        yield Router(f"http://{HOST}:{port}", f"{HOST}:{port}")
    finally:
        process.kill()
        process.wait()


class Servers:
    """A router, and servers that are started as they are asked for."""

    def __init__(
        self, release: str, directory: Path, where: Router, stack: ExitStack, plane: str, model: Model
    ) -> None:
        self.release, self.directory, self.router, self._model = release, directory, where, model
        self._stack = stack
        self._beginning: list[CpuServer] = []
        secret = directory / "secret"
        secret.write_text(secrets.token_hex(16))
        secret.chmod(0o600)
        self._fault = directory / "fault"
        self._fault.touch()
        self._environment = {
            "FASTDEPLOY_KVCACHE_PEER_SECRET_FILE": str(secret),
            "FASTDEPLOY_KVCACHE_TRANSFER_LIMITS": LIMITS,
            "FASTDEPLOY_KVCACHE_TRANSFER_PLANE": plane,
            "KVCACHE_TEST_FAULT": str(self._fault),
        }

    @contextmanager
    def fault(self, fault: Fault, rank: int | None = None) -> Iterator[None]:
        """Of the proxies before prefill servers that began with one: before all their ranks, unless `rank` is given."""
        self._fault.write_text(fault.name if rank is None else f"{fault.name} {rank}")
        try:
            yield
        finally:
            self._fault.write_text("")

    def begin(self, role: str, name: str, *flags: str, proxied: bool = False) -> CpuServer:
        """Starting; `mixed` ones stand beside the router. `proxied`: peers read from it through a `FaultProxy`."""
        own = ("--num-gpu-blocks-override", str(NUM_BLOCKS), *flags)
        if role != "mixed":
            own = (*own, "--splitwise-role", role, "--router", self.router.address)
        environment = {**self._environment, **({"PYTHONPATH": str(PROXY)} if proxied else {})}
        server = CpuServer(self.release, self.directory / name, *own, environment=environment, model=self._model)
        self._stack.callback(server.kill)
        self._beginning.append(server)
        return server

    def wait_ready(self, num_decode: int = 1) -> None:
        """Until all that have begun serve, and the router knows so many of each role."""
        while self._beginning:
            self._beginning.pop().wait_ready()
        self.router.wait_registered(prefill=1, decode=num_decode)


@contextmanager
def servers(release: str, directory: Path, plane: str = "socket", model: Model = PLAIN) -> Iterator[Servers]:
    with router(release, directory / "router", free_port()) as where, ExitStack() as stack:
        yield Servers(release, directory, where, stack, plane, model)


def num_fetches(decode: CpuServer) -> float:
    """Since its start: a request may be over before anybody looks at how many there are."""
    return decode.metrics()["transfers_started_total"]


def ask(client: OpenAI, text: str, **options: Any) -> tuple[int, ...]:
    """Tokens of a greedy answer."""
    return cpu_server.ask(client, text, **options).tokens


def hear(
    url: str, endpoint: str, streams: bool, text: str, *, timeout_s: float = 120.0
) -> tuple[str | None, list[int]]:
    """What a client hears at a router's or a server's `url`: the error, and tokens. No SDK reads it before we do."""
    given = {"prompt": text} if endpoint == "completions" else {"messages": [{"role": "user", "content": text}]}
    body = {"max_tokens": 12, "temperature": 0, "top_p": 0, "return_token_ids": True, "stream": streams, **given}
    try:
        reply = httpx2.post(f"{url}/v1/{endpoint}", json={"model": "tiny", **body}, timeout=timeout_s)
        lines = reply.text.splitlines() if streams else [f"data: {reply.text}"]
        parts = [json.loads(line[6:]) for line in lines if line.startswith("data: ") and line[6:].strip() != "[DONE]"]
    except (httpx2.HTTPError, ValueError) as error:
        return repr(error), []
    choices = [choice for part in parts for choice in part.get("choices", ())]
    tokens = [(each.get("delta") or each.get("message") or each).get("completion_token_ids") or [] for each in choices]
    errors = [str(part["error"]) for part in parts if "error" in part]
    if reply.status_code != 200:
        errors.append(reply.text)
    return errors[0] if errors else None, [token for each in tokens for token in each]


def wait_idle(*all_servers: CpuServer) -> None:
    """No request has a seat, and no block is lent, fetched or parked."""

    def busy() -> str:
        found = []
        for server in all_servers:
            metrics = server.metrics()
            kept = {
                name: metrics[name] for name in ("batch_size", "transfer_open", "granted_requests", "parked_blocks")
            }
            if metrics["device_free_blocks"] + metrics["device_cached_blocks"] < metrics["device_blocks"]:
                kept["device_free_blocks"] = metrics["device_free_blocks"]
            if any(kept.values()):
                found.append(f"{server.logs.parent.name}: {kept}")
        return "; ".join(found)

    wait_until(lambda: not busy(), busy, IDLE_TIMEOUT_S)
