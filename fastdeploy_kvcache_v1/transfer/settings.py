"""What both sides of a transfer are told: TransferSettings, deadlines and identity, and the PeerPort of the other."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import NamedTuple

from ..errors import ConfigError

__all__ = ["PeerPort", "TransferSettings", "require_secret"]

MIN_SECRET_BYTES = 16


def require_secret(secret: bytes) -> bytes:
    """Raises `ConfigError` for one that can be guessed."""
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"the shared secret of prefill and decode servers has {len(secret)} bytes: give at least "
            f"{MIN_SECRET_BYTES}, for example from `openssl rand -hex 16`"
        )
    return secret


class PeerPort(NamedTuple):
    """Where a decode rank listens."""

    host: str
    port: int


@dataclass(frozen=True, kw_only=True)
class TransferSettings:
    """Raises `ConfigError` for a value that cannot work. Times are seconds."""

    secret: bytes = field(repr=False)
    """All prefill and decode servers have the same one."""
    instance: str = field(default_factory=lambda: os.urandom(16).hex())
    """Another one in each process: a peer that restarted behind the same port is another peer."""
    handshake_s: float = 5.0
    ping_s: float = 1.0
    silence_s: float = 10.0
    """A link without a sign of its peer for so long is closed, and a read without progress fails."""
    lease_s: float = 60.0
    """A lease that the reader has not named for so long ends."""
    wait_s: float = 120.0
    """A fetch that has heard nothing new of its blocks for so long fails, though its link is alive."""

    def __post_init__(self) -> None:
        require_secret(self.secret)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name.endswith("_s") and not value > 0:
                raise ConfigError(f"{each.name} must be above 0 seconds, got {value}")
        if self.silence_s <= self.ping_s:
            raise ConfigError(f"silence_s ({self.silence_s}) must be above ping_s ({self.ping_s})")
