"""Runs worker, engine and HTTP server until a signal or a failure."""

from __future__ import annotations

import ipaddress
import logging
import signal
import socket
import threading
import time
from contextlib import ExitStack

from ... import __version__
from ...contract.tool_calls import tool_call_ends
from ...errors import ConfigError, StorageError
from ...scheduler.block_hashing import HASH_VERSION
from ...scheduler.cache_manager import CacheManager
from ...storage.backends import check_settings, make_tier
from ...storage.engine.link import StorageLink
from ...storage.model_digest import model_digest, numeric_variables, paddle_version, processor
from ...storage.namespace import Namespace
from ...storage.process import StoreProcess
from ...telemetry.trace_recorder import TraceRecorder
from ...transfer.settings import PeerPort
from .app import create_app
from .disaggregation.endpoints import add_role_routes
from .disaggregation.prefill_client import PrefillClient
from .disaggregation.settings import Role
from .engine.engine import PATIENCE_S, Engine
from .engine.engine_core import EngineCore
from .engine.offered_prefills import OfferedPrefills
from .engine.remote_prefills import RemotePrefills
from .http_server import HttpServer, ready_line
from .metrics import Metrics
from .requests import RequestReader
from .settings import ServerConfig
from .text import Tokenizer
from .worker.client import ProcessWorkerClient, StartInterruptedError

logger = logging.getLogger(__name__)

STORE_START_S = 5.0
LINGER_S = 1.0
"""Seconds that /health shows the reason after a worker died, before the server ends."""

EXIT_OK = 0
EXIT_WORKER_DIED = 1


def serve(config: ServerConfig, tokenizer: Tokenizer) -> int:
    """Serve until SIGINT or SIGTERM: 0. Returns 1 when the worker died. Main thread only.

    Raises `KVCacheError` when the port is taken or the worker does not start, and leaves nothing behind.
    """
    http = HttpServer()
    with ExitStack() as stack:
        # A handler that raised would interrupt any line. This one sets a flag that the server reads.
        for number in (signal.SIGINT, signal.SIGTERM):
            stack.callback(signal.signal, number, signal.signal(number, http.handle_exit))
        listener = stack.enter_context(_listening_socket(config.host, config.port))
        namespace = _checked_namespace(config)
        recorder = None
        if config.record_trace is not None:
            recorder = TraceRecorder(config.record_trace, config.cache.block_size)
            stack.callback(recorder.close)
        try:
            worker = ProcessWorkerClient(config, namespace=namespace, stop_requested=lambda: http.should_exit)
        except StartInterruptedError:
            return EXIT_OK
        stack.callback(worker.close)
        asker = None
        if config.role is not None and config.role.role is Role.DECODE:
            asker = PrefillClient(config.role.transfer)
            stack.callback(asker.close)
        core = _make_core(config, worker, namespace, recorder, asker)
        return _serve(config, tokenizer, worker, core, asker, listener, http)


def _serve(
    config: ServerConfig,
    tokenizer: Tokenizer,
    worker: ProcessWorkerClient,
    core: EngineCore,
    asker: PrefillClient | None,
    listener: socket.socket,
    http: HttpServer,
) -> int:
    failed = threading.Event()

    def on_fatal(reason: str) -> None:
        logger.error("no request can be served any more: %s", reason)
        failed.set()
        timer = threading.Timer(LINGER_S, http.stop)
        timer.daemon = True
        timer.start()

    core.counters.copies[:] = worker.copies
    reader = RequestReader(config, tokenizer)
    patience_s = PATIENCE_S if config.role is None else config.role.transfer.silence_s
    engine = Engine(core, worker, on_fatal=on_fatal, patience_s=patience_s)
    app = create_app(config, engine, reader, Metrics(core, reader.fields))
    if config.role is not None:
        add_role_routes(app, config, config.role, engine, tokenizer, worker.rank_infos)
    _warn_of_open_address(listener)
    chats = tokenizer.has_template and not config.is_random_model
    engine.start()
    if worker.storage is not None:
        worker.storage.listen(engine.on_storage)
        _wait_for_store(worker.storage)
    if asker is not None:
        asker.start(engine.on_prefill_answer)
    try:
        http.run_app(app, engine, listener, ready_line(config, listener.getsockname(), chats=chats))
    finally:
        engine.close(http.ends_at)
    return EXIT_WORKER_DIED if failed.is_set() else EXIT_OK


def _make_core(
    config: ServerConfig,
    worker: ProcessWorkerClient,
    namespace: Namespace | None,
    recorder: TraceRecorder | None,
    asker: PrefillClient | None,
) -> EngineCore:
    """Make cache, scheduler and requests. `namespace` of stored blocks, `asker` of a decode server."""
    manager, num_ranks, role = CacheManager(config.cache), config.tensor_parallel_size, config.role
    storage, remote = None, None
    if config.storage is not None and worker.storage is not None and namespace is not None:
        storage = make_tier(manager, config.storage, namespace, worker.storage)
    if role is not None and asker is not None:
        addresses = [PeerPort(role.address.host, end.port) for end in worker.rank_infos if end.port is not None]
        vocab_size = config.model.vocab_size
        remote = RemotePrefills(
            asker, addresses, role.transfer, block_size=config.cache.block_size, vocab_size=vocab_size
        )
    offered = OfferedPrefills(num_ranks) if role is not None and role.role is Role.PREFILL else None
    return EngineCore(
        manager,
        worker.send,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        storage=storage,
        remote=remote,
        offered=offered,
        recorder=recorder,
        num_ranks=num_ranks,
        tool_call_ends=frozenset() if config.model_path is None else tool_call_ends(config.model_path),
    )


def storage_namespace(config: ServerConfig) -> Namespace:
    """Namespace of the blocks that this server computes bit for bit. Reads the whole model. Raises `ModelError`."""
    own = config.model.shard(config.tensor_parallel_size)
    backend = own.cache_backend(block_size=config.cache.block_size, dtype=config.cache_dtype)
    math_library = f"{paddle_version()}, {', '.join(numeric_variables())}"
    return Namespace(
        model=f"{config.model}" if config.model_path is None else model_digest(config.model_path),
        weight_epoch="0",
        layout=backend.layout,
        block_size=config.cache.block_size,
        tensor_parallel_size=config.tensor_parallel_size,
        implementation=f"embedded {__version__}, {math_library}, {processor()}",
        hash_version=HASH_VERSION.decode(),
    )


def _checked_namespace(config: ServerConfig) -> Namespace | None:
    """The namespace, with a store or a role. Raises `ConfigError` for a store that cannot work; a store that does not
    work now is a warning.
    """
    if config.storage is None and config.role is None:
        return None
    namespace = storage_namespace(config)
    try:
        if config.storage is not None:
            check_settings(config.storage, namespace)
    except StorageError as error:
        logger.warning("storage fails now, the server starts without its blocks: %s", error)
    return namespace


def _wait_for_store(store: StorageLink | StoreProcess) -> None:
    """The first requests find their blocks, unless the store does not work."""
    deadline = time.monotonic() + STORE_START_S
    while isinstance(store, StoreProcess) and not store.is_serving and time.monotonic() < deadline:
        time.sleep(0.01)


def _warn_of_open_address(listener: socket.socket) -> None:
    address = listener.getsockname()[0]
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        logger.warning(
            "listening on %s: the server has no password, so every machine that reaches this one can use it; "
            "without --host it serves this machine only",
            address,
        )


def _listening_socket(host: str, port: int) -> socket.socket:
    """Bind before anything starts, so that a taken port is one line. The server listens later."""
    with ExitStack() as stack:
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            listener = stack.enter_context(socket.socket(family))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
        stack.pop_all()
        return listener
