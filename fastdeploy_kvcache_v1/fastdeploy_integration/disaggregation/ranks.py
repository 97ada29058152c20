"""The transfers of a worker rank, by its role. Imported only where FastDeploy is."""

from __future__ import annotations

from typing import Any

from fastdeploy import envs
from fastdeploy.inter_communicator import EngineWorkerQueue

from ..cpu_worker.environment import log_directory
from ..overlay import overlay
from . import settings
from .decode_rank import DecodeRank
from .messager import Messager
from .prefill_rank import PrefillRank
from .rank_channel import RankEnd
from .rank_role import RankRole

INFO_FILE = "kvcache_role.json"
"""In the directory of the logs."""


def rank_role(config: Any) -> RankRole | None:
    """Of the rank that an `FDConfig` describes; None in a mixed server. Raises `ConfigError`."""
    role, parallel = config.scheduler_config.splitwise_role, config.parallel_config
    if role == "mixed":
        return None
    choice, place = settings.transfer_choice(), settings.rank_place()
    channel = RankEnd(int(parallel.local_engine_worker_queue_port), int(parallel.tensor_parallel_rank))
    info_file = log_directory() / INFO_FILE
    if role == "decode":
        return DecodeRank(choice, place, channel, info_file)
    messager = Messager(_own_queue(parallel), acknowledges=overlay.active().table.capabilities.acknowledged_cache_info)
    return PrefillRank(choice, place, tell=messager.tell, tell_counts=channel.tell, info_file=info_file)


def _own_queue(parallel: Any) -> Any:
    """A connection to the engine's queue for the messager's threads."""
    port = parallel.local_engine_worker_queue_port
    in_memory = envs.FD_ENGINE_TASK_QUEUE_WITH_SHM
    return EngineWorkerQueue(
        address=f"/dev/shm/fd_task_queue_{port}.sock" if in_memory else (parallel.pod_ip, port),
        is_server=False,
        num_client=parallel.tensor_parallel_size,
        client_id=parallel.tensor_parallel_rank,
        local_data_parallel_id=parallel.local_data_parallel_id,
    )
