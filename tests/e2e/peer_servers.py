"""Prefill servers, decode servers and a router in processes of their own."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx2

from tests.e2e.server_process import EXIT_TIMEOUT_S, PROGRAM, CommandProcess, ServerProcess, wait_until

SECRET = "the secret of these tests"
QUICK = ("--transfer-silence", "4")
"""A stopped peer is found after 4 s; a busy machine is not taken for one."""

PATIENCE_S = 600.0
"""Four servers start at once, at times beside other tests."""


class RouterProcess(CommandProcess):
    """`fastdeploy-kvcache router` on a free port."""

    def __init__(self, directory: Path, *flags: str) -> None:
        super().__init__(directory, [*PROGRAM, "router", "--port", "0", *flags])

    def health(self) -> dict[str, dict[str, dict[str, object]]]:
        health: dict[str, dict[str, dict[str, object]]] = httpx2.get(f"{self.url}/health", timeout=30.0).json()
        return health

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(EXIT_TIMEOUT_S)


class Cluster:
    """Servers by name, `prefill0`, `decode0`, ..., and their router."""

    def __init__(self, directory: Path, flags: tuple[str, ...], environment: dict[str, str] | None = None) -> None:
        self.directory = directory
        self.servers: dict[str, ServerProcess] = {}
        self.stack = ExitStack()
        self._flags = flags
        self._environment = environment
        self._secret_file = directory / "secret"
        self._secret_file.write_text(SECRET)
        self._secret_file.chmod(0o600)
        self.router: RouterProcess

    @property
    def secret_flags(self) -> tuple[str, str]:
        return ("--peer-secret-file", str(self._secret_file))

    def start(self, name: str, *flags: str) -> ServerProcess:
        """Does not wait until it is ready."""
        role = re.sub(r"\d+", "", name)
        number = len(list(self.directory.iterdir()))
        server = ServerProcess(
            self.directory / f"{name}-{number}",
            *("--role", role, *self.secret_flags, *QUICK, *self._flags, *flags),
            environment=self._environment,
        )
        self.stack.callback(server.kill)
        self.servers[name] = server
        return server

    def start_router(self) -> None:
        urls = {role: [each.url for name, each in self.servers.items() if name.startswith(role)] for role in ROLES}
        flags = [word for role, listed in urls.items() if listed for word in (f"--{role}", *listed)]
        self.router = RouterProcess(self.directory / "router", *flags, *self.secret_flags, "--silence", "40")
        self.stack.callback(self.router.kill)
        self.router.wait_ready()
        self.wait_alive(*self.servers)

    def wait_alive(self, *names: str) -> None:
        """The router knows that these answer, and no other one does."""

        def is_so() -> bool:
            health = self.router.health()
            alive = {url for role in ROLES for url, state in health[role].items() if state["answers"]}
            return alive == {self.servers[name].url for name in names}

        wait_until(is_so, f"the router to know that {names} answer")

    def prefills(self) -> list[ServerProcess]:
        return [each for name, each in self.servers.items() if name.startswith("prefill")]

    def decodes(self) -> list[ServerProcess]:
        return [each for name, each in self.servers.items() if name.startswith("decode")]

    def total(self, role: str, metric: str) -> float:
        return sum(each.metrics()[metric] for name, each in self.servers.items() if name.startswith(role))

    def assert_idle(self) -> None:
        """Nothing leaked anywhere: blocks, leases, fetches."""
        for name, server in self.servers.items():
            report = server.wait_idle()
            assert report["ok"], (name, report)
            metrics = server.metrics()
            free = metrics["device_free_blocks"] + metrics["device_evictable_blocks"]
            assert metrics["device_blocks"] == free, name

    def stop(self) -> None:
        """In order, and nothing is left."""
        for server in self.servers.values():
            assert server.stop() == 0, server.stderr
            server.assert_nothing_left()
        self.router.process.send_signal(signal.SIGTERM)
        assert self.router.process.wait(EXIT_TIMEOUT_S) == 0


ROLES = ("prefill", "decode")


@contextmanager
def cluster(
    directory: Path,
    *flags: str,
    num_prefill: int = 1,
    num_decode: int = 1,
    role_flags: Mapping[str, tuple[str, ...]] | None = None,
    environment: dict[str, str] | None = None,
) -> Iterator[Cluster]:
    """All ready, and killed at the end. `flags` of every server, `role_flags` of those of a role."""
    directory.mkdir(exist_ok=True)
    made = Cluster(directory, flags, environment)
    with made.stack:
        for role, count in zip(ROLES, (num_prefill, num_decode), strict=True):
            for number in range(count):
                made.start(f"{role}{number}", *(role_flags or {}).get(role, ()))
        for server in made.servers.values():
            server.wait_ready(PATIENCE_S)
        made.start_router()
        yield made
