"""What a server with a role runs with, and the flags for it."""

from __future__ import annotations

import argparse
import enum
from dataclasses import dataclass
from pathlib import Path

from ...errors import ConfigError
from ...transfer import secret_file
from ...transfer.settings import PeerPort, TransferSettings

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
    """Where this server's worker listens: a prefill server for reads, a decode server for the prefill servers."""
    plane: str
    checksums: bool
    transfer: TransferSettings


DEFAULTS: dict[str, object] = {
    "role": "mixed",
    "transfer_address": "127.0.0.1",
    "transfer_plane": "socket",
    "transfer_silence": 10.0,
    "transfer_wait": 120.0,
    "transfer_lease": 60.0,
}


def add_role_arguments(parser: argparse.ArgumentParser) -> None:
    """Values that are not given stay None."""

    def add(flag: str, text: str, **options: object) -> None:
        default = DEFAULTS.get(flag.removeprefix("--").replace("-", "_"))
        parser.add_argument(flag, help=text + ("" if default is None else f" (default: {default})"), **options)  # type: ignore[arg-type]

    add(
        "--role",
        "prefill: compute prompts for decode servers as well; decode: read prompts that a prefill server computed; "
        "mixed: neither. Requests come through `fastdeploy-kvcache router`",
        metavar="ROLE",
    )
    add("--peer-secret-file", secret_file.HELP, type=Path, metavar="FILE")
    add(
        "--transfer-address",
        "with a role: address for blocks that peers reach, with a port if it is to be a certain one",
        metavar="HOST[:PORT]",
    )
    add("--transfer-plane", f"with a role: how blocks travel: {', '.join(PLANES)}", metavar="NAME")
    parser.add_argument(
        "--transfer-checksums",
        action=argparse.BooleanOptionalAction,
        help="with a role: find bytes that changed on the way (default: on)",
    )
    add("--transfer-silence", "a peer without a sign of life for so long counts as dead", type=float, metavar="SECONDS")
    add(
        "--transfer-wait",
        "a decode server computes a prompt itself when it hears nothing new of it for so long",
        type=float,
        metavar="SECONDS",
    )
    add(
        "--transfer-lease",
        "a prefill server keeps blocks for so long that nobody asks for",
        type=float,
        metavar="SECONDS",
    )


def role_settings(values: argparse.Namespace) -> RoleSettings | None:
    """None for the role mixed. Raises `ConfigError`."""
    given = {name: value for name in DEFAULTS if (value := getattr(values, name, None)) is not None}
    chosen = {**DEFAULTS, **given}
    roles = ("mixed", *(role.value for role in Role))
    if chosen["role"] not in roles:
        raise ConfigError(f"--role must be one of {', '.join(roles)}, got {chosen['role']!r}")
    secret_path = getattr(values, "peer_secret_file", None)
    if chosen["role"] == "mixed":
        for name in (*(each for each in given if each != "role"), *(["peer_secret_file"] if secret_path else [])):
            raise ConfigError(f"--{name.replace('_', '-')} needs --role prefill or --role decode")
        return None
    if chosen["transfer_plane"] in GPU_PLANES:
        raise ConfigError(
            f"--transfer-plane {chosen['transfer_plane']} needs a GPU, and this server computes on the CPU: choose one "
            f"of {', '.join(PLANES)}"
        )
    if chosen["transfer_plane"] not in PLANES:
        raise ConfigError(f"--transfer-plane must be one of {', '.join(PLANES)}, got {chosen['transfer_plane']!r}")
    checksums = getattr(values, "transfer_checksums", None)
    times = {name: chosen[f"transfer_{name}"] for name in ("silence", "wait", "lease")}
    for name, seconds in times.items():
        if not isinstance(seconds, float) or not 0 < seconds < float("inf"):
            raise ConfigError(f"--transfer-{name} must be a number of seconds above 0, got {seconds}")
    if times["silence"] <= 1:
        raise ConfigError(
            f"--transfer-silence must be above 1 second, the time between two signs, got {times['silence']}"
        )
    return RoleSettings(
        role=Role(chosen["role"]),
        address=_address(str(chosen["transfer_address"])),
        plane=str(chosen["transfer_plane"]),
        checksums=True if checksums is None else checksums,
        transfer=TransferSettings(
            secret=secret_file.read_secret(secret_path),
            **{f"{name}_s": seconds for name, seconds in times.items()},
        ),
    )


def _address(text: str) -> PeerPort:
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, "0"
    if not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"--transfer-address must be HOST or HOST:PORT, got {text!r}")
    return PeerPort(host.strip("[]"), int(port))
