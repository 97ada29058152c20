"""HostPool: the bytes of the host tier in one allocation, block-major, so that a block is one contiguous range."""

from __future__ import annotations

from ..attention.base import CacheLayout
from ..errors import CacheStateError, InvariantError
from .ops import BlockRows, HostBuffer, LayerRows
from .ops.rows import ByteRows
from .runtime import Runtime


class HostPool:
    """`num_blocks` host slots, laid out `[host_block][layer][role][bytes]`: `layout.block_bytes` each, and behind each
    block `trailer_bytes` that copies leave alone (a multiple of 64 keeps the alignment).

    Raises `ConfigError` if memory is short. `num_blocks=0` allocates nothing. Users of a slot ask the hazard
    table.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        runtime: Runtime,
        *,
        trailer_bytes: int = 0,
    ) -> None:
        """With a trailer, which is the store's, other processes can map the memory."""
        if num_blocks < 0:
            raise CacheStateError(f"a host pool cannot have {num_blocks} blocks")
        self.layout = layout
        self.num_blocks = num_blocks
        self.trailer_bytes = trailer_bytes
        self.slot_bytes = layout.block_bytes + trailer_bytes
        self._runtime = runtime
        self._buffer: HostBuffer | None = None
        self.layers: tuple[LayerRows, ...] = ()
        """Rows of the host blocks per layer and role; empty for an empty or freed pool."""
        if num_blocks:
            runtime.require_memory(device_bytes=0, host_bytes=self.nbytes)
            self._buffer = runtime.allocate_host(self.nbytes, shared=trailer_bytes > 0)
            self.layers = self._rows(self._buffer)

    def _rows(self, buffer: HostBuffer) -> tuple[LayerRows, ...]:
        layers, offset = [], 0
        for _layer in range(self.layout.num_layers):
            roles = []
            for role in self.layout.roles:
                address = buffer.address + offset
                roles.append(BlockRows(address, self.num_blocks, role.block_bytes, self.slot_bytes, owner=buffer.array))
                offset += role.block_bytes
            layers.append(LayerRows(roles))
        return tuple(layers)

    @property
    def nbytes(self) -> int:
        return self.num_blocks * self.slot_bytes

    def slot(self, slot: int) -> ByteRows:
        """Writable uint8 view `[slot_bytes]` of a block and its trailer. Raises `CacheStateError`: a foreign slot."""
        if self._buffer is None or not 0 <= slot < self.num_blocks:
            raise CacheStateError(f"host slot {slot} is not in [0, {self.num_blocks})")
        return self._buffer.array[slot * self.slot_bytes : (slot + 1) * self.slot_bytes]

    def memory_of_slot(self, slot: int) -> memoryview:
        """As `slot`, without NumPy."""
        return self.slot(slot).data

    @property
    def buffer(self) -> HostBuffer:
        """All slots in order. Raises `CacheStateError` for an empty or freed pool."""
        if self._buffer is None:
            raise CacheStateError("the host pool has no memory")
        return self._buffer

    def free(self) -> None:
        """Free the memory. No copy may be in flight. Idempotent."""
        self.layers = ()
        if self._buffer is not None:
            buffer, self._buffer = self._buffer, None
            self._runtime.free_host(buffer)

    def check(self) -> None:
        """Raises `InvariantError`. Every byte of every block belongs to exactly one (layer, role)."""
        if self._buffer is None:
            if self.layers:
                raise InvariantError("a host pool without memory has rows")
            return
        if self._buffer.nbytes != self.nbytes:
            raise InvariantError(f"the host pool holds {self._buffer.nbytes} bytes, its layout says {self.nbytes}")
        end = self._buffer.address
        for rows in (role for layer in self.layers for role in layer):
            if rows.address != end or rows.pitch != self.slot_bytes:
                raise InvariantError(f"host rows start at {rows.address}, the role before them ends at {end}")
            end += rows.row_bytes
        if end != self._buffer.address + self.layout.block_bytes:
            raise InvariantError("the rows of a host block do not fill it")
