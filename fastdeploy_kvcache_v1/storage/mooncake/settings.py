"""MooncakeSettings: where the master is, and what this process gives: from the file or the variables of FastDeploy."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...config import GIB, MIB
from ...errors import ConfigError

__all__ = ["MooncakeSettings", "largest_registration"]

FILE_VARIABLE = "MOONCAKE_CONFIG_PATH"
PREFIX = "MOONCAKE_"
PROTOCOLS = ("rdma", "tcp")
LARGEST_REGISTRATION = (1 * GIB, 6 * GIB)
"""Bounds of `MC_MAX_MR_SIZE`: what a NIC registers as one."""


@dataclass(frozen=True)
class MooncakeSettings:
    """Raises `ConfigError` when constructed with a value that cannot work. The names of the fields are Mooncake's."""

    metadata_server: str
    """`P2PHANDSHAKE`, or the URL of a metadata server."""
    master_server_addr: str
    """`host:port`."""
    local_hostname: str = ""
    """How other machines reach this one; empty: its address on the way to the master."""
    global_segment_size: int = GIB
    """Bytes of memory that a server gives to the store, for each of its ranks."""
    local_buffer_size: int = MIB
    protocol: str = "rdma"
    rdma_devices: str = ""
    """Separated by commas. Empty: any."""

    def __post_init__(self) -> None:
        for name in ("metadata_server", "master_server_addr"):
            if not getattr(self, name):
                raise ConfigError(
                    f"mooncake needs {name}: give it in the file that {FILE_VARIABLE} names, or as "
                    f"{PREFIX}{name.upper()}"
                )
        host, _, port = self.master_server_addr.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(f"mooncake's master_server_addr must be HOST:PORT, got {self.master_server_addr!r}")
        if self.local_hostname.partition(":")[0] == "localhost":
            raise ConfigError(
                "mooncake's local_hostname is the address under which other machines reach this one, and localhost "
                "would lead them to themselves: give an address, or leave it out"
            )
        if self.protocol not in PROTOCOLS:
            raise ConfigError(f"unknown mooncake protocol {self.protocol!r}: choose one of {', '.join(PROTOCOLS)}")
        for name in ("global_segment_size", "local_buffer_size"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"mooncake's {name} must be above 0 bytes, got {getattr(self, name)}")

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> MooncakeSettings:
        """From the JSON file that MOONCAKE_CONFIG_PATH names, else from MOONCAKE_<NAME OF THE FIELD>.

        Raises `ConfigError` for a file that cannot be read, and for a value that cannot work.
        """
        path = environment.get(FILE_VARIABLE)
        if path:
            given = _read_file(Path(path))
        else:
            names = [field.name for field in fields(cls)]
            given = {
                name: environment[PREFIX + name.upper()] for name in names if environment.get(PREFIX + name.upper())
            }
        kinds = {field.name: int if isinstance(field.default, int) else str for field in fields(cls)}
        values = {name: _value(name, given[name], kind) for name, kind in kinds.items() if given.get(name) is not None}
        return cls(**{"metadata_server": "", "master_server_addr": "", **values})

    @property
    def hostname(self) -> str:
        """`local_hostname`, or the address of this machine from which the master is reached.

        Raises `ConfigError` when the master's name is unknown.
        """
        if self.local_hostname:
            return self.local_hostname
        host, _, port = self.master_server_addr.rpartition(":")
        try:
            family, kind, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as probe:
                probe.connect(address)  # sends nothing
                return str(probe.getsockname()[0])
        except OSError as error:
            raise ConfigError(
                f"cannot find mooncake's master {self.master_server_addr}: {error.strerror}; check master_server_addr"
            ) from None

    @property
    def devices(self) -> str:
        """`rdma_devices` without spaces and empty names: all of them, for memory of every rank."""
        return ",".join(filter(None, map(str.strip, self.rdma_devices.split(","))))


def largest_registration(environment: Mapping[str, str]) -> int:
    """Bytes that are registered as one at most: MC_MAX_MR_SIZE, from 1 to 6 GiB; 6 GiB where it is not given.

    Raises `ConfigError` for one that is no number.
    """
    low, high = LARGEST_REGISTRATION
    given: int = _value("MC_MAX_MR_SIZE", environment.get("MC_MAX_MR_SIZE") or high, int)
    return min(max(given, low), high)


def _read_file(path: Path) -> dict[str, Any]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}, which {FILE_VARIABLE} names: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}, which {FILE_VARIABLE} names, is not JSON: {error}") from None
    if not isinstance(given, dict):
        raise ConfigError(f"{path}, which {FILE_VARIABLE} names, must hold a JSON object")
    return given


def _value(name: str, given: Any, kind: type[int] | type[str]) -> Any:
    """Numbers may be given as text, as variables are."""
    if kind is int and isinstance(given, str | int) and not isinstance(given, bool):
        try:
            return int(given)
        except ValueError:
            pass
    elif kind is str and isinstance(given, str):
        return given
    elif kind is str and isinstance(given, list):  # devices
        return ",".join(map(str, given))
    raise ConfigError(f"mooncake's {name} must be {'a whole number' if kind is int else 'text'}, got {given!r}")
