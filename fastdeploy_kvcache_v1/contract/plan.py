"""Plan: what other sizes of the tiers would have hit. `fastdeploy-kvcache explain --plan` prints it."""

from __future__ import annotations

import msgspec

PATH = "/v1/cache/plan"

FEWEST_REQUESTS = 2000
FEWEST_EVICTIONS = 20
"""Blocks that must have left the cache: more memory is worth nothing before."""


class PlannedSize(msgspec.Struct, frozen=True):
    """One tier at another size, while the other tier keeps its size."""

    tier: str
    num_blocks: int
    hit_share: float
    """Of the prompt tokens, from both tiers."""
    error: float
    """Two standard errors of the difference from the real size."""
    written_blocks: int
    """Blocks that would have been copied to the host."""


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """Made from the latest requests of a server."""

    is_ready: bool = True
    """False while it is being computed: ask again."""
    failure: str = ""
    """Why there is none."""
    device_blocks: int = 0
    host_blocks: int = 0
    """Real sizes."""
    block_bytes: int = 0
    """On all ranks together; 0: unknown."""
    num_requests: int = 0
    seconds: float = 0.0
    """Time from the first to the last of these requests."""
    hit_share: float = 0.0
    """What the real cache hit."""
    written_blocks: int = 0
    evicted_blocks: int = 0
    sizes: list[PlannedSize] = []
    """Empty before `FEWEST_REQUESTS` and `FEWEST_EVICTIONS`. Without a host tier, sizes of one."""
