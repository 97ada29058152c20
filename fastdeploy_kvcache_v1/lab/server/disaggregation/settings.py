"""Settings and flags of a server with a role."""

from __future__ import annotations

import argparse
import enum
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from ....contract.flags import Flag
from ....errors import ConfigError
from ....transfer.secret_file import read_secret
from ....transfer.settings import PeerPort, TransferSettings

__all__ = ["PEER_SECRET_FILE", "ROLE_FLAGS", "Role", "RoleSettings", "role_settings"]

PLANES = ("socket", "mooncake")
"""Not `cuda_ipc`: the embedded server computes on the CPU."""


class Role(str, enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True)
class RoleSettings:
    """Every value has been checked."""

    role: Role
    address: PeerPort
    """Where rank 0 listens: at a prefill server for reads, at a decode server for prefill servers."""
    plane: str
    transfer: TransferSettings
    checksums: bool = True

    def address_of(self, rank: int) -> PeerPort:
        """Rank 0 has the first port, 0 for a free one; later ranks have the ports behind it."""
        port = self.address.port
        return self.address._replace(port=port + rank if port else 0)


_role = partial(Flag, group="prefill and decode")
_seconds = partial(_role, type=float, unit="SECONDS", above=0)

PEER_SECRET_FILE = _role(
    "peer_secret_file",
    "file with the secret that all prefill and decode servers and their router share, 16 bytes or more",
    Path,
    otherwise="one that is made in the user's cache directory, which servers of one machine find",
    unit="FILE",
)
ROLE_FLAGS = (
    _role(
        "role",
        "prefill servers compute prompts for decode servers as well, decode servers read what prefill servers "
        "computed; requests come through `fastdeploy-kvcache router`",
        default="mixed",
        unit="ROLE",
        choices=("mixed", *Role),
    ),
    PEER_SECRET_FILE,
    _role(
        "transfer_address",
        "address for blocks that peers reach, with a port if it is to be a certain one; rank r of several has PORT + r",
        default="127.0.0.1",
        unit="HOST[:PORT]",
    ),
    _role(
        "transfer_plane", "how blocks travel, the same on all servers", default="socket", unit="NAME", choices=PLANES
    ),
    _role(
        "transfer_checksums",
        "find bytes that changed on the way, by checksums of the data plane and a digest of both memories",
        bool,
        default=True,
    ),
    _seconds(
        "transfer_silence",
        "time without a heartbeat after which a peer counts as dead, and without a computed layer a worker",
        default=TransferSettings.silence_s,
        above=TransferSettings.ping_s,
    ),
    _seconds(
        "transfer_wait",
        "time without news of a prompt after which a decode server computes it itself",
        default=TransferSettings.wait_s,
    ),
    _seconds(
        "transfer_lease",
        "time for which a prefill server keeps offered blocks that no decode server requests",
        default=TransferSettings.lease_s,
    ),
)


def role_settings(values: argparse.Namespace) -> RoleSettings | None:
    """None for a mixed server. `values` has the checked `ROLE_FLAGS`. Raises `ConfigError`."""
    if values.role == "mixed":
        for flag in ROLE_FLAGS:
            if getattr(values, flag.name) != flag.default:
                raise ConfigError(f"{flag.option} needs --role prefill or --role decode")
        return None
    return RoleSettings(
        role=Role(values.role),
        address=_address(values.transfer_address),
        plane=values.transfer_plane,
        checksums=values.transfer_checksums,
        transfer=TransferSettings(
            secret=read_secret(values.peer_secret_file),
            silence_s=values.transfer_silence,
            wait_s=values.transfer_wait,
            lease_s=values.transfer_lease,
        ),
    )


def _address(text: str) -> PeerPort:
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, "0"
    if not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"--transfer-address must be HOST or HOST:PORT, got {text!r}")
    return PeerPort(host.strip("[]"), int(port))
