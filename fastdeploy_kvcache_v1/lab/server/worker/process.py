"""The worker process: model, caches and copies. `python -m fastdeploy_kvcache_v1.lab.server.worker.process`.

Its arguments are the file descriptors of the pipes to the engine and to other ranks. It ends at the engine's `None` or
with the engine process, and ignores SIGINT and SIGTERM. SIGUSR1 drops the batch that it computes: the engine sends it
with `None`, after all requests were answered.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import time
import warnings
from multiprocessing.connection import Connection
from types import FrameType

from msgspec.structs import replace

from ....contract.messages import BatchRequest
from ....errors import ConfigError, KVCacheError, ModelError, RankGroupError, StorageError, WorkerDiedError
from ....transfer.rank_transfers import RankTransfers
from ....transfer.role_info import RankInfo
from ....worker.cache_controller import CacheController
from ...child_processes import die_with_parent
from ...model import configure_reproducible_math, load_model
from ...model.copy_faults import VARIABLE, make_runtime
from ...model.ranks import Ranks, inherited_pipes
from ...model.step import LayerComputed, StepResult
from ...model.step_runner import StepRunner
from .messages import WorkerLaunch, WorkerReady
from .outside import RankStorage, digest_of, host_trailer_bytes, make_transfers

logger = logging.getLogger(__name__)

OPEN_COPIES_POLL_S = 0.005
OPEN_TRANSFERS_POLL_S = 0.001
"""Each fetch takes several turns, for which its request waits."""
IDLE_TRANSFERS_POLL_S = 0.1
DRAIN_TIMEOUT_S = 5.0

SIGN_S = 1.0
"""Least time between two signs of life."""

LIBGOMP = "libgomp.so.1"

END_OF_GROUP_S = 10.0
"""Wait of a rank that lost another one, so that the engine reports the rank that ended first."""

SAME_STOP_S = 0.5
"""Longest time between the stops of two ranks."""


class BatchDroppedError(BaseException):
    """The engine needs no answer. Not an `Exception`, so no handler takes it for a failed batch."""


class Stop:
    """Handles SIGUSR1 on the main thread."""

    def __init__(self) -> None:
        self.was_asked = False
        self._is_computing = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.was_asked = True
        if self._is_computing:
            self._is_computing = False
            raise BatchDroppedError

    def compute(self, runner: StepRunner, batch: BatchRequest) -> StepResult:
        """Raises `BatchDroppedError` once the signal has arrived."""
        if self.was_asked:
            raise BatchDroppedError
        self._is_computing = True
        try:
            return runner.run(batch)
        finally:
            self._is_computing = False


class SignsOfLife:
    """Tells the engine that a long step goes on."""

    def __init__(self, link: Connection) -> None:
        self._link = link
        self._sent_at = -SIGN_S

    def layer_computed(self) -> None:
        now = time.monotonic()
        if now - self._sent_at >= SIGN_S:
            self._sent_at = now
            self._link.send(LayerComputed())


def main() -> int:
    stop = Stop()
    signal.signal(signal.SIGUSR1, stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    link, *peers = inherited_pipes(sys.argv[1:])
    launch = link.recv()
    assert isinstance(launch, WorkerLaunch)
    die_with_parent(launch.parent_pid)
    logging.basicConfig(
        level=launch.config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s worker{launch.rank or ''} %(name)s: %(message)s",
    )
    ranks = Ranks(launch.rank, peers, size=launch.config.tensor_parallel_size)  # the engine notices when one ends
    return _serve(launch, link, ranks, stop)


def _serve(launch: WorkerLaunch, link: Connection, ranks: Ranks, stop: Stop) -> int:
    try:
        runner, controller, transfers = _build(launch, ranks, SignsOfLife(link))
        settings, storage = launch.config.storage, None
        if settings is not None and launch.link is not None:
            storage = RankStorage(settings, launch.link, ranks, controller, launch.namespace)
    except Exception as error:  # the edge of the process: the engine process reports it
        if not isinstance(error, KVCacheError):
            logger.exception("the worker cannot start")
        is_user_error = isinstance(error, ConfigError | ModelError | StorageError)
        link.send(error if is_user_error else WorkerDiedError(f"the worker cannot start: {error!r}"))
        return 1
    info = None if transfers is None else RankInfo(transfers.port, transfers.plane_address, transfers.geometry)
    link.send(WorkerReady(controller.copies, info))
    try:
        _loop(runner, link, transfers, stop)
        controller.transfers.drain(DRAIN_TIMEOUT_S)
    except BatchDroppedError:
        pass
    except RankGroupError as error:
        time.sleep(SAME_STOP_S)  # the other rank may have been stopped just before this one
        if not stop.was_asked:
            logger.error("rank %d cannot go on: %s", launch.rank, error)
            link.poll(END_OF_GROUP_S)
            return 1
    finally:
        if transfers is not None:
            transfers.close()
        if storage is None or storage.close():
            controller.free()  # the memory of a store that hangs goes with the process
    return 0


def _build(
    launch: WorkerLaunch, ranks: Ranks, signs: SignsOfLife
) -> tuple[StepRunner, CacheController, RankTransfers | None]:
    config = launch.config
    configure_reproducible_math(config.threads)
    warnings.filterwarnings("ignore", "No ccache found", UserWarning)  # paddle at import; nothing here compiles
    _import_paddle()  # only now, since this fixes the mode of its math library

    model = replace(config.model, max_position=config.max_model_len)
    block_size = config.cache.block_size
    backend = model.shard(ranks.size).cache_backend(block_size=block_size, dtype=config.cache_dtype)
    computing = load_model(config.model_path, model, backend.layout, ranks)
    controller = CacheController(
        backend,
        runtime=make_runtime(os.environ.get(VARIABLE, ""), ranks.rank),
        rank=ranks.rank,
        host_trailer_bytes=host_trailer_bytes(config.storage),
    )
    caches = controller.initialize_kv_cache(config.cache.num_device_blocks, config.cache.num_host_blocks)
    transfers = None
    if config.role is not None and launch.namespace is not None:
        transfers = make_transfers(
            config.role,
            controller,
            block_size=block_size,
            model=digest_of(launch.namespace),
            num_kv_heads=None if model.ranks_cache_alike else model.num_kv_heads,
            rank=ranks.rank,
            num_ranks=ranks.size,
        )

    runner = StepRunner(
        computing.forward,
        controller,
        caches,
        block_size=block_size,
        guess=computing.guess,
        transfers=transfers,
        ranks=ranks,
        layer_computed=signs.layer_computed,
    )
    return runner, controller, transfers


def _import_paddle() -> None:
    """Raises `ConfigError` if the system lacks libgomp, which Paddle's wheel does not bring."""
    try:
        importlib.import_module("paddle")
    except ImportError as error:
        if LIBGOMP not in str(error):
            raise
        raise ConfigError(f"paddle cannot be loaded ({error}): apt-get install libgomp1") from None


def _loop(runner: StepRunner, link: Connection, transfers: RankTransfers | None, stop: Stop) -> None:
    """Answer batches until the engine sends `None`. Between them, report copies, leases and fetches that ended."""
    while True:
        if link.poll(_patience_s(runner.has_open_copies, transfers)):
            batch: BatchRequest | None = link.recv()
            if batch is None:
                return
            link.send(stop.compute(runner, batch))
        elif (report := runner.take_report()).transfers:
            link.send(report)
        if transfers is not None:
            transfers.turn()
            if news := transfers.take_news():
                link.send(news)


def _patience_s(copies: bool, transfers: RankTransfers | None) -> float | None:
    """Longest wait for the next batch; None: no limit."""
    if transfers is None:
        return OPEN_COPIES_POLL_S if copies else None
    if transfers.is_busy:
        return OPEN_TRANSFERS_POLL_S
    return OPEN_COPIES_POLL_S if copies else IDLE_TRANSFERS_POLL_S


if __name__ == "__main__":
    sys.exit(main())
