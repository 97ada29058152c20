"""CudaIpcPlane: GPU memory of another process on the same machine, read by the GPU itself, through CUDA IPC.

docs/operate/roles.md says what was tried, and how.
"""

from __future__ import annotations

import atexit
import logging
from collections.abc import Sequence
from ctypes import byref, c_int

from ..errors import CacheStateError, ConfigError, PeerRefusedError, RemoteReadError, TransferError
from ..worker.cuda.driver import driver
from ..worker.cuda.runtime import CudaStream, use_device
from ..worker.ops.rows import BlockRows
from .cuda_ipc_address import (
    KIND,
    CudaIpcAddress,
    SharedAllocation,
    SharedRegion,
    gpu_name,
    this_machine,
    this_process,
)
from .cuda_ipc_source import CudaIpcSource, Mapped
from .one_sided import OneSidedPlane
from .peer_memory import Gpu, PeerMemory
from .plane import Source
from .presence import Presence, Visit

__all__ = ["CudaIpcPlane"]

logger = logging.getLogger(__name__)

READERS_LEAVE_S = 10.0
"""For readers to close what they have mapped, before its owner frees it."""

_SOLUTION = (
    "it must come from cudaMalloc, or a pool over it: leave FLAGS_use_cuda_malloc_async_allocator, "
    "FLAGS_use_virtual_memory_auto_growth and FLAGS_use_cuda_managed_memory unset"
)


class CudaIpcPlane(OneSidedPlane):
    """All tensors of a rank are on one GPU. A peer may be on the same GPU or on one with peer access.

    **A handle names a whole allocation, and lets its owner write, too**: `address` is a secret. `close` waits for the
    readers, because CUDA says nothing good of memory that is freed while it is mapped elsewhere.
    """

    address_is_secret = True

    def __init__(self) -> None:
        """Raises `ConfigError` where there is no GPU, no driver, or no CuPy."""
        super().__init__()
        self._memory = _load()
        self._gpu = Gpu(0, b"")
        self._address: CudaIpcAddress | None = None
        self._presence: Presence | None = None
        # The GPU's library ends with the interpreter, and a read must not be in it then.
        atexit.register(self._close_sources)

    def _register(self, regions: Sequence[BlockRows]) -> None:
        if not all(region.on_gpu for region in regions):
            raise ConfigError("cuda_ipc needs a GPU: these tensors are in CPU memory; choose socket or mooncake")
        gpus = {self._memory.gpu_of(region.address) for region in regions}
        if len(gpus) != 1:
            raise ConfigError(f"cuda_ipc reads tensors of one GPU per rank, got tensors of {len(gpus)}")
        (self._gpu,) = gpus
        use_device(self._gpu.number)
        shared, parts = _share(self._memory, regions)
        try:
            self._presence = Presence()
        except OSError as error:
            raise ConfigError(f"cuda_ipc cannot lock a file in shared memory: {error}") from None
        self._address = CudaIpcAddress(
            KIND, this_machine(), this_process(), self._presence.path, self._gpu.uuid, shared, parts
        )

    def address(self) -> bytes:
        assert self._address is not None, "register comes first"
        return self._address.pack()

    def open(self, address: bytes, deadline: float) -> Source:
        peer = CudaIpcAddress.unpack(address)
        self._require_reachable(peer)
        use_device(self._gpu.number)
        mapped = Mapped(self._memory, self._gpu.number, _visit(peer.presence))
        try:
            bases = [mapped.map(allocation.handle) for allocation in peer.allocations]
            stream = CudaStream(self._gpu.number, "peer-reads")
        except (ConfigError, TransferError, RuntimeError) as error:
            mapped.close()
            raise PeerRefusedError(
                f"the memory of {gpu_name(peer.gpu)} cannot be mapped on {gpu_name(self._gpu.uuid)} ({error}): "
                "containers need one IPC namespace, and both GPUs visible"
            ) from None
        theirs = [(bases[part.allocation] + part.offset, part.num_bytes) for part in peer.regions]
        return self._opened(CudaIpcSource(mapped, stream, theirs, self._regions))

    def close(self) -> None:
        self._close_sources()
        presence, self._presence = self._presence, None
        if presence is not None and not presence.close(READERS_LEAVE_S):
            logger.warning(
                "a peer has had our GPU memory mapped for %g s after it was told to leave: it reads garbage once the "
                "memory is used again; is it stopped?",
                READERS_LEAVE_S,
            )
        self._owners.clear()
        atexit.unregister(self._close_sources)

    def _require_reachable(self, peer: CudaIpcAddress) -> None:
        if peer.machine != this_machine():
            raise PeerRefusedError("the peer is on another machine: cuda_ipc reads GPUs of this one; choose mooncake")
        if peer.process == this_process():
            raise PeerRefusedError("the peer is this process: CUDA maps memory of other processes only")
        if self._memory.reaches(self._gpu.number, peer.gpu) is False:
            raise PeerRefusedError(
                f"{gpu_name(self._gpu.uuid)} does not reach the memory of {gpu_name(peer.gpu)}: put both servers on "
                "GPUs with peer access (nvidia-smi topo -p2p r), or choose mooncake"
            )


def _load() -> PeerMemory:
    try:
        driver().call("cuDriverGetVersion", byref(c_int()))
    except ConfigError as error:
        raise ConfigError(f"cuda_ipc needs a GPU: {error}") from None
    try:
        import cupy  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"cuda_ipc needs CuPy ({error}): pip install 'fastdeploy-kvcache-v1[gpu]'") from None
    return PeerMemory()


def _share(memory: PeerMemory, regions: Sequence[BlockRows]) -> tuple[list[SharedAllocation], list[SharedRegion]]:
    """Each allocation once, and where the tensors lie in them."""
    shared: dict[int, SharedAllocation] = {}  # by where it begins: nobody promises that its handle is always the same
    parts = []
    for region in regions:
        try:
            allocation = memory.export(region.address)
        except ConfigError as error:
            raise ConfigError(f"{error}: {_SOLUTION}") from None
        offset, num_bytes = region.address - allocation.base, region.num_rows * region.row_bytes
        if offset + num_bytes > allocation.num_bytes:
            raise CacheStateError(f"a tensor of {num_bytes} bytes goes beyond its allocation")
        shared.setdefault(allocation.base, SharedAllocation(allocation.handle, allocation.num_bytes))
        parts.append(SharedRegion(list(shared).index(allocation.base), offset, num_bytes))
    return list(shared.values()), parts


def _visit(path: str) -> Visit:
    try:
        return Visit(path)
    except FileNotFoundError:
        raise RemoteReadError(
            "the peer has ended, or has another /dev/shm: containers need one IPC namespace"
        ) from None
    except OSError as error:
        raise PeerRefusedError(f"the peer's {path} cannot be opened ({error}): run both servers as one user") from None
