"""Wires worker, engine and HTTP server together and runs them until a signal or a failure ends them."""

from __future__ import annotations

import hashlib
import ipaddress
import logging
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import Any

from fastapi import FastAPI

from ..errors import ConfigError, StorageError
from ..model import load_model_config
from ..scheduler.cache_manager import CacheManager
from ..storage.backends import check_backend, make_tier
from ..storage.namespace import Namespace
from ..trace_recorder import TraceRecorder
from ..transfer.settings import PeerPort
from ..worker import ops
from .app import create_app
from .disaggregation.prefill_client import PrefillClient
from .disaggregation.prefill_endpoint import add_prefill_route
from .disaggregation.role_info import add_role_route, role_info
from .disaggregation.settings import Role
from .engine.engine import Engine
from .engine.engine_core import EngineCore
from .engine.offered_prefills import OfferedPrefills
from .engine.peer_requests import PeerRequests
from .engine.remote_prefills import RemotePrefills
from .engine.scheduler import Scheduler
from .http_server import HttpServer
from .metrics import Metrics, Snapshot
from .requests import RequestReader
from .settings import ServerConfig
from .storage_namespace import storage_namespace
from .text import Tokenizer
from .worker.client import ProcessWorkerClient, StartInterruptedError, WorkerConfig
from .worker.messages import TransferEnd
from .worker.transfers import TransferConfig

logger = logging.getLogger(__name__)

LINGER_S = 1.0
"""After the worker was lost, /health shows the reason this long before the server ends."""

EXIT_OK = 0
EXIT_WORKER_DIED = 1


class NotedSignals:
    """Notes SIGINT and SIGTERM while it is entered; code that can end in order looks at `noted`. Main thread only.

    An exception from a signal handler would be simpler, but it strikes anywhere: between the creation of
    a ZeroMQ socket and its registration it makes the context wait without end for that socket.
    """

    NUMBERS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self._noted = False
        self._before: list[Any] = []

    def noted(self) -> bool:
        return self._noted

    def __enter__(self) -> NotedSignals:
        self._before = [signal.signal(number, self._note) for number in self.NUMBERS]
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in zip(self.NUMBERS, self._before, strict=True):
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted = True


def serve(config: ServerConfig, tokenizer: Tokenizer, *, copy_faults: str = "") -> int:
    """Serve until SIGINT or SIGTERM: 0. Returns 1 when the worker died or was stuck: run it under a supervisor.

    Main thread only. Raises `KVCacheError` when the port is taken or the worker does not start; nothing is left behind.
    """
    with NotedSignals() as signals, _listening_socket(config.host, config.port) as listener, ExitStack() as stack:
        namespace = _checked_namespace(config)
        recorder = None
        if config.record_trace is not None:
            recorder = TraceRecorder(config.record_trace, config.cache.block_size)
            stack.callback(recorder.close)
        try:
            worker = ProcessWorkerClient(
                _worker_config(config, namespace, copy_faults),
                stop_requested=signals.noted,
                timeout_s=config.worker_timeout_s,
            )
        except StartInterruptedError:
            return EXIT_OK
        stack.callback(worker.close)
        return _serve(config, tokenizer, worker, listener, signals, namespace, recorder)


def _serve(
    config: ServerConfig,
    tokenizer: Tokenizer,
    worker: ProcessWorkerClient,
    listener: socket.socket,
    signals: NotedSignals,
    namespace: Namespace | None,
    recorder: TraceRecorder | None,
) -> int:
    failed = threading.Event()

    def on_fatal(reason: str) -> None:
        logger.error("no request can be served any more: %s", reason)
        failed.set()
        timer = threading.Timer(LINGER_S, http.stop)
        timer.daemon = True
        timer.start()

    asker, remote = _remote_prefills(config, worker)
    manager, scheduler, core = _make_core(config, worker, namespace, recorder, remote)
    metrics = Metrics(lambda: _snapshot(manager, scheduler, core), copy_ops=worker.ops, copy_paths=worker.copy_paths)
    core.observe_first_token = metrics.observe_first_token
    if core.storage is not None:
        core.storage.observe_latency = metrics.observe_storage
    engine = Engine(core, worker, on_fatal=on_fatal)
    app = create_app(config, engine, RequestReader(config, tokenizer), metrics)
    _add_role_routes(app, config, engine, tokenizer, worker.transfer_ends)
    _warn_of_open_address(listener)
    ops.warn_of_slow_copies()
    chats = tokenizer.has_template and not config.is_random_model
    http = HttpServer(app, config, engine, chats=chats, stop_requested=signals.noted)
    engine.start()
    if worker.storage is not None:
        worker.storage.listen(engine.on_storage)
    if asker is not None:
        asker.start(engine.on_prefill_answer)
    try:
        http.run(sockets=[listener])
    finally:
        if asker is not None:
            asker.close()
        engine.close()
    return EXIT_WORKER_DIED if failed.is_set() else EXIT_OK


def _make_core(
    config: ServerConfig,
    worker: ProcessWorkerClient,
    namespace: Namespace | None,
    recorder: TraceRecorder | None,
    remote: RemotePrefills | None,
) -> tuple[CacheManager, Scheduler, EngineCore]:
    """Cache, decisions and requests. `namespace` of what is stored, `remote` of a decode server."""
    manager = CacheManager(config.cache)
    storage = None
    if config.storage is not None and worker.storage is not None and namespace is not None:
        storage = make_tier(manager, config.storage, namespace, worker.storage)
    scheduler = Scheduler(
        manager,
        block_size=config.cache.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        may_start=lambda generation: storage is None or storage.may_start(generation.request_id),
        is_remote=lambda generation, num_matched: remote is not None and remote.wants(generation, num_matched),
    )
    is_prefill = config.role is not None and config.role.role is Role.PREFILL
    offered = OfferedPrefills(config.tensor_parallel_size) if is_prefill else None
    peers = PeerRequests(manager, scheduler, remote=remote, offered=offered)
    core = EngineCore(
        manager,
        scheduler,
        worker.send,
        storage=storage,
        recorder=recorder,
        peers=peers,
        num_ranks=config.tensor_parallel_size,
    )
    return manager, scheduler, core


def _add_role_routes(
    app: FastAPI, config: ServerConfig, engine: Engine, tokenizer: Tokenizer, ends: Sequence[TransferEnd]
) -> None:
    """Of a server with a role; `ends` are where others reach its workers."""
    role = config.role
    if role is None:
        return
    add_role_route(app, role_info(role, ends))
    if role.role is Role.PREFILL:
        add_prefill_route(app, config, engine, tokenizer, role.transfer.secret)


def _remote_prefills(
    config: ServerConfig, worker: ProcessWorkerClient
) -> tuple[PrefillClient | None, RemotePrefills | None]:
    """Of a decode server."""
    if config.role is None or config.role.role is not Role.DECODE:
        return None, None
    asker = PrefillClient(config.role.transfer)
    host = config.role.address.host
    addresses = [PeerPort(host, end.port) for end in worker.transfer_ends if end.port is not None]
    remote = RemotePrefills(
        asker, addresses, config.role.transfer, block_size=config.cache.block_size, vocab_size=config.vocab_size
    )
    return asker, remote


def _transfer_config(config: ServerConfig) -> TransferConfig | None:
    """Reads the whole model: both sides compare what decides the bytes of a block. Raises `ModelError`."""
    role = config.role
    if role is None:
        return None
    namespace = storage_namespace(config)
    model = load_model_config(config.model_path, config.model_family, mtp=config.mtp)
    return TransferConfig(
        settings=role.transfer,
        address=role.address,
        is_decode=role.role is Role.DECODE,
        plane=role.plane,
        checksums=role.checksums,
        model=hashlib.sha256(f"{namespace.model} {namespace.implementation}".encode()).hexdigest()[:32],
        num_kv_heads=None if model.ranks_cache_alike else model.num_kv_heads,
    )


def _checked_namespace(config: ServerConfig) -> Namespace | None:
    """Raises `ConfigError` when the store cannot work. One that does not work now is left for later."""
    if config.storage is None:
        return None
    namespace = storage_namespace(config)
    try:
        check_backend(config.storage, namespace)
    except StorageError as error:
        logger.warning("the storage does not work now, the server starts without its blocks: %s", error)
    return namespace


def _warn_of_open_address(listener: socket.socket) -> None:
    address = listener.getsockname()[0]
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        logger.warning(
            "listening on %s: the server has no password, so every machine that reaches this one can use it; "
            "without --host it serves this machine only",
            address,
        )


def _snapshot(manager: CacheManager, scheduler: Scheduler, core: EngineCore) -> Snapshot:
    return Snapshot(
        manager.stats(),
        core.counters,
        scheduler.num_running,
        scheduler.num_waiting,
        core.storage,
        core.recorder,
        core.peers,
    )


def _worker_config(config: ServerConfig, namespace: Namespace | None, copy_faults: str) -> WorkerConfig:
    return WorkerConfig(
        model_path=config.model_path,
        max_model_len=config.max_model_len,
        block_size=config.cache.block_size,
        cache_dtype=config.cache_dtype,
        num_device_blocks=config.cache.num_device_blocks,
        num_host_blocks=config.cache.num_host_blocks,
        log_level=config.log_level,
        num_threads=config.num_threads,
        storage=config.storage,
        namespace=namespace,
        copy_faults=copy_faults,
        model_family=config.model_family,
        mtp=config.mtp,
        transfer=_transfer_config(config),
        tensor_parallel_size=config.tensor_parallel_size,
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
