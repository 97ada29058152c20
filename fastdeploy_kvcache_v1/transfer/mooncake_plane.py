"""MooncakePlane: Mooncake's Transfer Engine, over TCP or RDMA.

The engine runs in this process, because it reads and fills the cache tensors where they are. It has one instance that
serves, and one for each peer that is read: after a batch that failed its bytes may still arrive for seconds, and only
dropping the instance ends that.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import os
import re
from collections.abc import Sequence
from typing import Any

import msgspec

from ..config import GIB
from ..errors import ConfigError, PeerRefusedError
from ..worker.ops.rows import BlockRows
from .mooncake_source import MooncakeSource
from .one_sided import OneSidedPlane, Region, region_of
from .plane import Source

__all__ = ["ENVIRONMENT", "MooncakePlane"]

PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
FIRST_VERSION = (0, 3, 12, 1)
"""0.3.12.post1. Older ones say that a transfer is done before it is."""
PROTOCOLS = ("tcp", "rdma")

ENVIRONMENT = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_LOG_LEVEL": "ERROR",
}
"""A peer that stands still is given up after 2 s instead of 30, where the user says nothing else."""

LARGEST_REGISTRATION = GIB
"""Bytes that are registered as one."""

_KIND = "mooncake"


class _Address(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    kind: str
    protocol: str
    session: str
    """`host:port` of the serving engine; the port is another one after a restart."""
    regions: list[Region]
    """Where each tensor begins in the peer's memory, and its bytes."""


class MooncakePlane(OneSidedPlane):
    """`host` is the address that peers reach.

    **The engine authenticates nobody and listens on every address of the machine**: who reaches its port reads and
    writes registered memory. Use it on a network of its own.
    """

    def __init__(self, host: str, *, protocol: str = "tcp", device: str = "") -> None:
        """`device`: of RDMA, empty for any. Raises `ConfigError` when the engine cannot be loaded."""
        if protocol not in PROTOCOLS:
            raise ConfigError(f"unknown mooncake protocol {protocol!r}: choose one of {', '.join(PROTOCOLS)}")
        super().__init__()
        self._host, self._protocol, self._device = host, protocol, device
        self._module = _load()
        self._serving: Any = None
        # A read that runs while the interpreter ends aborts the process.
        atexit.register(self.close)

    def _register(self, regions: Sequence[BlockRows]) -> None:
        if self._protocol == "tcp" and any(region.on_gpu for region in regions):
            raise ConfigError("mooncake over tcp reads memory of the CPU only: choose rdma for tensors on a GPU")
        self._serving = self._engine([region_of(region) for region in regions])

    def address(self) -> bytes:
        assert self._serving is not None, "register comes first"
        session = f"{self._host}:{self._serving.get_rpc_port()}"
        return msgspec.msgpack.encode(_Address(_KIND, self._protocol, session, self._regions))

    def open(self, address: bytes, deadline: float) -> Source:
        try:
            peer = msgspec.msgpack.decode(address, type=_Address)
        except msgspec.MsgspecError:
            peer = None
        if peer is None or (peer.kind, peer.protocol) != (_KIND, self._protocol):
            raise PeerRefusedError(
                f"the peer's data plane is not mooncake over {self._protocol}: give prefill and decode servers the "
                "same one"
            )
        engine = self._engine(self._regions)
        return self._opened(MooncakeSource(engine, peer.session, peer.regions, self._regions))

    def close(self) -> None:
        self._close_sources()
        self._serving = None
        atexit.unregister(self.close)

    def _engine(self, regions: Sequence[Region]) -> Any:
        engine = self._module.TransferEngine()
        if engine.initialize(self._host, "P2PHANDSHAKE", self._protocol, self._device) != 0:
            raise ConfigError(
                f"mooncake cannot start over {self._protocol} on {self._host}: its message is above; check the "
                "address and, over rdma, the device"
            )
        for address, num_bytes in regions:
            for offset in range(0, num_bytes, LARGEST_REGISTRATION):
                part = min(LARGEST_REGISTRATION, num_bytes - offset)
                if engine.register_memory(address + offset, part) != 0:
                    raise ConfigError(
                        f"mooncake cannot register {part} bytes over {self._protocol}: is the limit of "
                        "locked memory (ulimit -l) too low?"
                    )
        return engine


def _load() -> Any:
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    version = None
    for package in PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
        break
    install = f"pip install '{PACKAGES[0]}>=0.3.12.post1' (with a GPU '{PACKAGES[1]}>=0.3.12.post1')"
    if version is None:
        raise ConfigError(f"the mooncake data plane needs a package: {install}")
    if _numbers(version) < FIRST_VERSION:
        raise ConfigError(f"mooncake {version} says that transfers are done before they are: {install}")
    try:
        return importlib.import_module("mooncake.engine")
    except ImportError as error:
        raise ConfigError(
            f"mooncake cannot be loaded ({error}): apt-get install libibverbs1 libnuma1 libcurl4"
        ) from None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))
