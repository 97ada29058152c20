"""What a server with a role runs with, and the flags for it."""

from __future__ import annotations

import argparse
import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....errors import ConfigError
from ....transfer import secret_file
from ....transfer.settings import PeerPort, TransferSettings

__all__ = ["DEFAULTS", "Role", "RoleSettings", "add_role_arguments", "role_settings"]

PLANES = ("socket", "mooncake")
GPU_PLANES = ("cuda_ipc",)
"""Of FastDeploy's servers only: the embedded server computes on the CPU."""


class Role(str, enum.Enum):
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, kw_only=True)
class RoleSettings:
    """Every value has been checked."""

    role: Role
    address: PeerPort
    """Where worker rank 0 listens: a prefill server for reads, a decode server for the prefill servers."""
    plane: str
    transfer: TransferSettings
    checksums: bool = True

    def address_of(self, rank: int) -> PeerPort:
        """0 for a free port; the ranks behind rank 0 have the ports behind its."""
        port = self.address.port
        return self.address._replace(port=port + rank if port else 0)


DEFAULTS: dict[str, object] = {
    "role": "mixed",
    "transfer_address": "127.0.0.1",
    "transfer_plane": "socket",
    "transfer_checksums": True,
    "transfer_silence": 10.0,
    "transfer_wait": 120.0,
    "transfer_lease": 60.0,
}

TIMES = {
    "silence": "a peer without a sign of life for so long counts as dead",
    "wait": "a decode server computes a prompt itself when it hears nothing new of it for so long",
    "lease": "a prefill server keeps blocks for so long that nobody asks for",
}


def add_role_arguments(parser: argparse.ArgumentParser) -> None:
    """Values that are not given stay None."""

    def add(flag: str, text: str, **options: Any) -> None:
        default = DEFAULTS.get(flag.removeprefix("--").replace("-", "_"))
        parser.add_argument(flag, help=text + ("" if default is None else f" (default: {default})"), **options)

    add(
        "--role",
        "prefill: compute prompts for decode servers as well; decode: read prompts that a prefill server computed; "
        "mixed: neither. Requests come through `fastdeploy-kvcache router`",
        metavar="ROLE",
    )
    add("--peer-secret-file", secret_file.HELP, type=Path, metavar="FILE")
    address = "with a role: address for blocks that peers reach, with a port if it is to be a certain one"
    add("--transfer-address", address, metavar="HOST[:PORT]")
    add("--transfer-plane", f"with a role: how blocks travel: {', '.join(PLANES)}", metavar="NAME")
    checksums = "with a role: find bytes that changed on the way"
    add("--transfer-checksums", checksums, action=argparse.BooleanOptionalAction)
    for name, text in TIMES.items():
        add(f"--transfer-{name}", text, type=float, metavar="SECONDS")


def role_settings(values: argparse.Namespace) -> RoleSettings | None:
    """None for the role mixed. Raises `ConfigError`."""
    names = (*DEFAULTS, "peer_secret_file")
    given = {name: value for name in names if (value := getattr(values, name, None)) is not None}
    chosen: dict[str, Any] = {**DEFAULTS, **given}
    roles = ("mixed", *(role.value for role in Role))
    if chosen["role"] not in roles:
        raise ConfigError(f"--role must be one of {', '.join(roles)}, got {chosen['role']!r}")
    if chosen["role"] == "mixed":
        for name in given.keys() - {"role"}:
            raise ConfigError(f"--{name.replace('_', '-')} needs --role prefill or --role decode")
        return None
    plane = chosen["transfer_plane"]
    if plane not in PLANES:
        why = (
            "needs a GPU, and this server computes on the CPU: choose" if plane in GPU_PLANES else "is unknown: choose"
        )
        raise ConfigError(f"--transfer-plane {plane} {why} one of {', '.join(PLANES)}")
    times = {f"{name}_s": chosen[f"transfer_{name}"] for name in TIMES}
    for name in TIMES:
        if not 0 < times[f"{name}_s"] < float("inf"):
            raise ConfigError(f"--transfer-{name} must be a number of seconds above 0, got {times[f'{name}_s']}")
    if times["silence_s"] <= 1:
        raise ConfigError(
            f"--transfer-silence must be above 1 second, the time between two signs, got {times['silence_s']}"
        )
    return RoleSettings(
        role=Role(chosen["role"]),
        address=_address(chosen["transfer_address"]),
        plane=plane,
        checksums=chosen["transfer_checksums"],
        transfer=TransferSettings(secret=secret_file.read_secret(chosen.get("peer_secret_file")), **times),
    )


def _address(text: str) -> PeerPort:
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, "0"
    if not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"--transfer-address must be HOST or HOST:PORT, got {text!r}")
    return PeerPort(host.strip("[]"), int(port))
