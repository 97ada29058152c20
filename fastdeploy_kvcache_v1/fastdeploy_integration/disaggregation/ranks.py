"""The transfers of a worker rank, by its role."""

from __future__ import annotations

from typing import Any

from . import settings
from .decode_rank import DecodeRank
from .prefill_rank import PrefillRank
from .rank_channel import RankEnd
from .rank_role import RankRole

RANKS: dict[str, type[RankRole]] = {"prefill": PrefillRank, "decode": DecodeRank}
"""By `--splitwise-role`."""


def rank_role(config: Any) -> RankRole | None:
    """Of the rank that an `FDConfig` describes; None in a mixed server. Raises `ConfigError`."""
    role, parallel = config.scheduler_config.splitwise_role, config.parallel_config
    if role == "mixed":
        return None
    channel = RankEnd(int(parallel.local_engine_worker_queue_port), int(parallel.tensor_parallel_rank))
    return RANKS[role](settings.transfer_choice(), settings.rank_place(), channel)
