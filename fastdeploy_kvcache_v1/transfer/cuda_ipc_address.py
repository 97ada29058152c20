"""What a `CudaIpcPlane` tells its peers, checked as it is read: where its tensors lie in which allocations."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Annotated

import msgspec

from ..errors import PeerRefusedError
from .peer_memory import HANDLE_BYTES, UUID_BYTES

__all__ = ["CudaIpcAddress", "SharedAllocation", "SharedRegion", "gpu_name", "this_machine", "this_process"]

KIND = "cuda_ipc"

_IN_THIS_PROCESS = os.urandom(16)

Bytes = Annotated[int, msgspec.Meta(gt=0, lt=2**48)]
Offset = Annotated[int, msgspec.Meta(ge=0, lt=2**48)]


class SharedAllocation(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A handle names a whole allocation, whatever was asked for."""

    handle: Annotated[bytes, msgspec.Meta(min_length=HANDLE_BYTES, max_length=HANDLE_BYTES)]
    num_bytes: Bytes


class SharedRegion(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A tensor: a part of an allocation, for a pool allocates more than is asked for."""

    allocation: Annotated[int, msgspec.Meta(ge=0)]
    offset: Offset
    num_bytes: Bytes


class CudaIpcAddress(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """Whoever knows it may read **and write** the allocations: it goes only over links that proved the secret."""

    kind: str
    machine: str
    process: bytes
    presence: str
    """See `Presence`."""
    gpu: Annotated[bytes, msgspec.Meta(min_length=UUID_BYTES, max_length=UUID_BYTES)]
    allocations: list[SharedAllocation]
    regions: list[SharedRegion]

    def pack(self) -> bytes:
        """As bytes."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, address: bytes) -> CudaIpcAddress:
        """Raises `PeerRefusedError` for anything else, and for tensors outside of their allocations."""
        try:
            made = msgspec.msgpack.decode(address, type=cls)
        except msgspec.MsgspecError:
            made = None
        if made is None or made.kind != KIND:
            raise PeerRefusedError(f"the peer's data plane is not {KIND}: give prefill and decode servers the same one")
        for region in made.regions:
            known = made.allocations[region.allocation : region.allocation + 1]
            if not known or region.offset + region.num_bytes > known[0].num_bytes:
                raise PeerRefusedError("the peer names tensors outside of its GPU memory")
        return made


def this_machine() -> str:
    """The same in all containers of a machine, another one after it was started again."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def this_process() -> bytes:
    """Process ids alone repeat in containers, random bytes alone in forked children."""
    return _IN_THIS_PROCESS + os.getpid().to_bytes(8, "little")


def gpu_name(gpu: bytes) -> str:
    """As nvidia-smi -L shows it."""
    return f"GPU-{uuid.UUID(bytes=gpu)}"
