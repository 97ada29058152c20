"""Wires worker, engine and HTTP server together and runs them until a signal or a failure ends them."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from ..cache_manager import CacheManager
from ..errors import ConfigError
from .api import create_app
from .engine import Engine
from .engine_core import EngineCore
from .http_server import HttpServer
from .metrics import Metrics, Snapshot
from .scheduler import Scheduler
from .service import Service
from .settings import ServerConfig
from .tokenizer import Tokenizer
from .worker_client import ProcessWorkerClient, WorkerConfig

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""After the worker died, /health shows the reason this long before the server ends."""

LISTEN_BACKLOG = 2048

EXIT_OK = 0
EXIT_WORKER_DIED = 1


class Signalled(BaseException):
    """SIGINT or SIGTERM arrived outside the HTTP server's own loop."""


def serve(config: ServerConfig, tokenizer: Tokenizer, *, copy_faults: str = "") -> int:
    """Serve until SIGINT or SIGTERM: 0. Returns 1 when the worker died: run the server under a supervisor.

    Main thread only. Raises `KVCacheError` when the port or the worker cannot be had; nothing is left behind.
    """
    try:
        with _signals_raise(), _listening_socket(config.host, config.port) as listener:
            worker = ProcessWorkerClient(_worker_config(config, copy_faults))
            try:
                return _serve(config, tokenizer, worker, listener)
            finally:
                _ignore_signals()  # from here on a signal must not tear the clean-up apart
                worker.close()
    except Signalled:
        return EXIT_OK


def _serve(config: ServerConfig, tokenizer: Tokenizer, worker: ProcessWorkerClient, listener: socket.socket) -> int:
    failed = threading.Event()

    def on_fatal(reason: str) -> None:
        logger.error("no request can be served any more: %s", reason)
        failed.set()
        timer = threading.Timer(LINGER_S, http.stop)
        timer.daemon = True
        timer.start()

    manager = CacheManager(config.cache)
    scheduler = Scheduler(
        manager,
        block_size=config.cache.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    core = EngineCore(manager, scheduler, worker.send)
    metrics = Metrics(lambda: _snapshot(manager, scheduler, core), copy_ops=worker.ops)
    core.observe_first_token = metrics.observe_first_token
    engine = Engine(core, worker, on_fatal=on_fatal)
    http = HttpServer(create_app(Service(config, tokenizer, engine), metrics), config, engine)
    engine.start()
    try:
        http.run(sockets=[listener])
    except Signalled:
        logger.info("ended by a signal")  # uvicorn has finished, and raised it again for us
    finally:
        _ignore_signals()
        engine.close()
    return EXIT_WORKER_DIED if failed.is_set() else EXIT_OK


def _snapshot(manager: CacheManager, scheduler: Scheduler, core: EngineCore) -> Snapshot:
    return Snapshot(
        manager.stats(), core.counters, len(scheduler.running), len(scheduler.waiting), scheduler.num_preemptions
    )


def _worker_config(config: ServerConfig, copy_faults: str) -> WorkerConfig:
    return WorkerConfig(
        model_path=config.model_path,
        block_size=config.cache.block_size,
        cache_dtype=config.cache_dtype,
        num_device_blocks=config.cache.num_device_blocks,
        num_host_blocks=config.cache.num_host_blocks,
        log_level=config.log_level,
        copy_faults=copy_faults,
    )


@contextmanager
def _listening_socket(host: str, port: int) -> Iterator[socket.socket]:
    """Bound before anything is started, so that a taken port costs nothing but one line."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error}") from None
    with listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}") from None
        yield listener


@contextmanager
def _signals_raise() -> Iterator[None]:
    """SIGINT and SIGTERM raise `Signalled` where uvicorn does not handle them: at start-up, and at its end."""

    def handle(number: int, frame: FrameType | None) -> None:
        raise Signalled

    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, handle) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _ignore_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
