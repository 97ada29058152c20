"""CacheReport: what a server tells `fastdeploy-kvcache explain`.

A report has no text, token or salt. A salted prompt cannot be recognized without its salt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from .misses import Miss

PATH = "/v1/cache/explain"
MOST_LISTED = 512
"""Requests that a report lists at most."""

Labels = Mapping[str, str]
Metrics = Mapping[str, Sequence[tuple[Labels, float]]]
"""Samples by name, without prefix."""


class RequestMiss(msgspec.Struct, frozen=True):
    """What an admitted request missed."""

    request_id: str
    age_s: float
    """Time since the request started."""
    tenant: int
    """Number of its salt in this report; 0 without a salt."""
    first: str
    """Digest of the first block that was not a hit, the same on other servers; empty if no full block was missed."""
    miss: Miss

    @property
    def prompt_tokens(self) -> int:
        return self.miss.at_token + self.miss.num_tokens


class CacheReport(msgspec.Struct, frozen=True):
    server: str
    """Random name of this cache manager: two servers behind one address have two."""
    block_size: int
    block_bytes: int
    """On all ranks together, 0 for unknown."""
    device_blocks: int
    host_blocks: int
    requests: list[RequestMiss]
    """The latest ones, the newest last."""
    metrics: Metrics


def missed(requests: Iterable[RequestMiss]) -> int:
    """Count the prompt tokens that were not hits."""
    return sum(request.miss.num_tokens for request in requests)
