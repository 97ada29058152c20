"""CpuWorker, driven by FastDeploy's event loop. Imports FastDeploy."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fastdeploy import envs
from fastdeploy.inter_communicator import IPCSignal
from fastdeploy.worker.worker_base import WorkerBase

from ...fastdeploy_integration import settings, swap_space
from ...fastdeploy_integration.disaggregation.ranks import rank_role
from ...fastdeploy_integration.link import ReportSender, rank_link
from ...fastdeploy_integration.settings import log_directory
from ...fastdeploy_integration.worker.storage import rank_storage
from ...worker.runtime.base import free_host_memory
from ..model.ranks import Ranks, inherited_pipes
from . import RANK_PIPES, run_directory
from .runner import CpuModelRunner, RunnerConfig, stats_file
from .token_channel import TokenSender, channel_path

logger = logging.getLogger(__name__)

PROFILE_SHARE = 0.1
"""Share of the free memory for a device tier without a given size."""

MAX_PROFILE_BYTES = 1 << 29

RANKS_TIMEOUT_S = 300.0
"""Time without a message after which a rank counts as lost and the server ends."""


class CpuWorker(WorkerBase):  # type: ignore[misc]  # FastDeploy has no types
    """One rank on the CPU. FastDeploy's control requests call methods by name."""

    def __init__(self, fd_config: Any, local_rank: int, rank: int) -> None:
        super().__init__(fd_config, local_rank, rank)
        self.model_runner: CpuModelRunner

    def init_device(self) -> None:
        engine = int(self.parallel_config.local_data_parallel_id)
        ranks = Ranks(
            int(self.parallel_config.tensor_parallel_rank),
            inherited_pipes(os.environ.pop(RANK_PIPES, "").split()),
            size=int(self.parallel_config.tensor_parallel_size),
            timeout_s=RANKS_TIMEOUT_S,
        )
        sender = TokenSender(channel_path(run_directory(), engine)) if ranks.rank == 0 else None
        config = RunnerConfig(
            model_path=Path(self.model_config.model),
            block_size=self.cache_config.block_size,
            num_host_blocks=int(self.cache_config.num_cpu_blocks or 0),
            cache_dtype=str(self.model_config.dtype),
            keep_host_memory=not envs.FD_ENABLE_SWAP_SPACE_CLEARING,
        )
        link = rank_link(self.fd_config)
        storage = rank_storage(self.fd_config, link)
        role = rank_role(self.fd_config, link.send)
        self.model_runner = CpuModelRunner(
            config,
            sender,
            stats_file=stats_file(log_directory(), int(self.local_rank)),
            tell_weights_status=_tell_weights_status,
            tell_copies=ReportSender(link.send),
            storage=storage,
            ranks=ranks,
            transfers=role,
        )
        link.listen({name: act for each in (storage, role) if each for name, act in each.handlers.items()})
        swap_space.compare(self.model_runner.block_bytes, settings.host_block_bytes(), config.num_host_blocks)

    def load_model(self) -> None:
        self.model_runner.load_weights()

    def get_model(self) -> None:
        """Returns None: there is no Paddle layer."""

    def determine_available_memory(self) -> int:
        """Bytes for the device tier."""
        share = min(MAX_PROFILE_BYTES, int(free_host_memory() * PROFILE_SHARE))
        return share // int(self.parallel_config.tensor_parallel_size)

    def cal_theortical_kvcache(self) -> int:
        """Bytes of one block (FastDeploy's spelling)."""
        return self.model_runner.block_bytes

    def initialize_cache(self, num_gpu_blocks: int) -> None:
        self.model_runner.create_caches(int(num_gpu_blocks))
        # Kept, because its collection would unmap the memory of its value.
        ranks = self.parallel_config
        self._cache_ready = _signal(
            "cache_ready_signal", ranks.local_engine_worker_queue_port, int(ranks.tensor_parallel_size)
        )
        self._cache_ready.value[int(ranks.tensor_parallel_rank)] = 1

    def graph_optimize_and_warm_up_model(self) -> None:
        """Nothing to capture."""

    def exist_prefill(self) -> bool:
        return False

    def check_health(self) -> bool:
        return True

    def preprocess_new_task(self, req_dicts: Sequence[Any], num_running_requests: int) -> None:
        self.model_runner.insert_tasks(req_dicts)

    def execute_model(self, model_forward_batch: Any = None, num_running_request: int = 0) -> None:
        self.model_runner.execute(int(num_running_request or 0))

    def sleep(self, tags: str) -> None:
        """Control request: drop `weight`, `kv_cache` or both."""
        if "weight" in tags.split(","):
            self.model_runner.drop_weights()
        if "kv_cache" in tags.split(","):
            self.model_runner.drop_caches()

    def wakeup(self, tags: str) -> None:
        """Control request: undo `sleep`, reading weights from the model's directory."""
        self.model_runner.restore(weights="weight" in tags.split(","), caches="kv_cache" in tags.split(","))

    def update_weights(self, version: str | None = None, verify_checksum: bool = False) -> None:
        """Control request: read the weights again from the model's directory."""
        self.model_runner.load_weights()


def _signal(name: str, port: int, size: int = 1) -> Any:
    """The engine's signal `name` of `size` numbers; `port`: of its worker queue."""
    return IPCSignal(name=name, array=np.zeros([size], dtype=np.int32), dtype=np.int32, suffix=port, create=False)


def _tell_weights_status(port: int, status: int) -> None:
    signal = _signal("model_weights_status", port)
    signal.value[0] = status
