"""Flags of `serve --fastdeploy-cpu`: a few are handled here, the others pass through to FastDeploy."""

from __future__ import annotations

import argparse
import importlib.util
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ...config import DEFAULT_PORT
from ...errors import ConfigError
from ...fastdeploy_integration.overlay.table import known_releases
from ...switch import SWITCH, is_enabled
from .activation import TABLE_NAME

START_TIMEOUT_S = 300.0

REFUSED = {
    "--enable-logprob": "the CPU worker gives no log probabilities",
    "--speculative-config": "the CPU worker has no speculative decoding",
    "--guided-decoding-backend": "the CPU worker has no guided decoding",
}
"""FastDeploy's flags that would be ignored or fail late, with the reason."""


PORTS = ("--ports", "--engine-worker-queue-port", "--cache-queue-port")
"""Flags that name a port for each data parallel engine, 0 for a free one."""


@dataclass(frozen=True)
class Settings:
    """Of the supervisor. Ports are resolved, none is 0, and there is one for each data parallel engine."""

    host: str
    ports: tuple[int, ...]
    queue_ports: tuple[int, ...]
    cache_queue_ports: tuple[int, ...]
    log_directory: Path
    start_timeout_s: float
    model: str | None
    """None: the random model."""
    tensor_parallel_size: int
    passed_on: tuple[str, ...]
    """Flags for FastDeploy."""
    uses_our_manager: bool

    @property
    def urls(self) -> list[str]:
        return [f"http://{self.host}:{port}" for port in self.ports]


def parse(words: Sequence[str]) -> Settings:
    """Raises `ConfigError` for a wrong or refused flag."""
    if importlib.util.find_spec("fastdeploy") is None:
        raise ConfigError(
            "--fastdeploy-cpu runs FastDeploy's server, but FastDeploy is not installed here: install release "
            f"{' or '.join(known_releases(TABLE_NAME))}, or name its checkout in PYTHONPATH, and beside it pip install "
            "'fastdeploy-kvcache-v1[embedded]'"
        )
    parser = argparse.ArgumentParser(prog="fastdeploy-kvcache serve --fastdeploy-cpu", allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT)
    for flag in PORTS:
        parser.add_argument(flag, type=_numbers)
    parser.add_argument("--model")
    parser.add_argument("--tensor-parallel-size", "--tensor_parallel_size", "-tp", type=int, default=1)
    parser.add_argument("--data-parallel-size", "--data_parallel_size", "-dp", type=int, default=1)
    parser.add_argument("--log-dir", type=Path)
    parser.add_argument("--start-timeout", type=float, default=START_TIMEOUT_S)
    args, rest = parser.parse_known_args(words)
    _refuse(rest)
    for flag, size in (("tensor", args.tensor_parallel_size), ("data", args.data_parallel_size)):
        if size < 1:
            raise ConfigError(f"--{flag}-parallel-size must be at least 1, got {size}")
    if args.start_timeout <= 0:
        raise ConfigError(f"--start-timeout must be positive, got {args.start_timeout}")
    ports, queue_ports, cache_queue_ports = _engine_ports(args)
    return Settings(
        host=args.host,
        ports=ports,
        queue_ports=queue_ports,
        cache_queue_ports=cache_queue_ports,
        log_directory=_log_directory(args.log_dir, ports[0]),
        start_timeout_s=args.start_timeout,
        model=args.model,
        tensor_parallel_size=args.tensor_parallel_size,
        passed_on=tuple(rest),
        uses_our_manager=_uses_our_manager(rest),
    )


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def _engine_ports(args: argparse.Namespace) -> list[tuple[int, ...]]:
    """Of each of `PORTS`, resolved. Raises `ConfigError`."""
    size = args.data_parallel_size
    wanted: list[int] = []
    for flag in PORTS:
        first = args.port if flag == "--ports" else 0
        given = getattr(args, flag[2:].replace("-", "_")) or [first, *[0] * (size - 1)]
        if len(given) != size:
            raise ConfigError(f"{flag} must name a port for each of {size} data parallel engines, got {given}")
        wanted += given
    ports = free_ports(args.host, *wanted)
    return [tuple(ports[each * size : (each + 1) * size]) for each in range(len(PORTS))]


def _refuse(rest: Sequence[str]) -> None:
    for word in rest:
        flag = word.split("=", 1)[0].replace("_", "-")
        if flag in REFUSED:
            raise ConfigError(f"{flag} cannot be used with --fastdeploy-cpu: {REFUSED[flag]}: leave it out")


def _uses_our_manager(rest: Sequence[str]) -> bool:
    """True unless the environment says otherwise. Raises `ConfigError` for flags that then need a GPU."""
    is_on = is_enabled(unset="1")
    flags = {word.split("=", 1)[0].replace("_", "-") for word in rest}
    for flag, what in (("--swap-space", "swapping"), ("--splitwise-role", "transfer of blocks")):
        if not is_on and flag in flags:
            raise ConfigError(f"{flag} needs {SWITCH}=1 on a CPU, because FastDeploy's own {what} needs a GPU")
    return is_on


def _log_directory(given: Path | None, port: int) -> Path:
    path = given or Path("log") / f"fastdeploy-cpu-{port}-{time.strftime('%Y%m%d-%H%M%S')}"
    if " " in str(path.resolve()):
        raise ConfigError(f"FastDeploy cannot write logs to {path.resolve()}, a path with spaces: set --log-dir")
    return path.resolve()


def free_ports(host: str, *wanted: int) -> list[int]:
    """The wanted ports, with a different free one for each 0. Raises `ConfigError` for a port in use."""
    with ExitStack() as stack:
        ports = []
        for port in wanted:
            probe = stack.enter_context(socket.socket())
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except (OSError, OverflowError) as error:
                raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
            ports.append(probe.getsockname()[1])
        return ports
