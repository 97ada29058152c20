"""DataPlane: the contract of every way to read a peer's blocks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from ..worker.ops.rows import BlockRows
from .spans import Spans

__all__ = ["DataPlane", "Source"]


class Source(ABC):
    """One peer's registered tensors. One thread reads at a time; any thread may close."""

    @abstractmethod
    def read(self, lease: str, spans: Spans, deadline: float) -> None:
        """Fill the target bytes of `spans` with the peer's; the peer has opened `lease` over all of them.

        Returns when all bytes are there. Raises `RemoteReadError` when they are not there by `deadline` (seconds of
        `time.monotonic`; a plane may take a little longer to stop), or the peer fails or refuses; the target bytes
        hold anything then. Either way nothing more is written afterwards. A source that raised reads nothing more:
        close it and open another. `CacheStateError`, nothing read, for target bytes that are not registered here.
        """

    @abstractmethod
    def close(self) -> None:
        """Any thread. A read that runs raises; when this returns, no byte can arrive any more. Idempotent."""


class DataPlane(ABC):
    """One rank's end: serves its own tensors to peers, and opens those of peers. Thread-safe but for `register`."""

    address_is_secret = False
    """Whoever knows `address` reads the tensors with no other proof: it goes to peers that proved the secret, and into
    no file, log or answer.
    """

    @abstractmethod
    def register(self, regions: Sequence[BlockRows]) -> None:
        """The tensors of this rank in flat order: region = layer * roles + role. Once, before anything else.

        They must stay until `close` has returned. Raises `ConfigError` for memory that this plane cannot reach.
        """

    @abstractmethod
    def address(self) -> bytes:
        """What a peer needs to `open` this plane; another one after a restart, also at the same port."""

    @abstractmethod
    def open(self, address: bytes, deadline: float) -> Source:
        """Connect to the plane with that address, of the same kind. Raises `PeerRefusedError` for another kind or a
        peer that is not who it should be, `RemoteReadError` when it does not answer by `deadline`.
        """

    @abstractmethod
    def grant(self, lease: str, slots: Collection[int]) -> None:
        """From now on, who names `lease` may read these blocks."""

    @abstractmethod
    def revoke(self, lease: str) -> None:
        """No read that names `lease` ends well from now on, in planes that can tell. Idempotent; never blocks."""

    @abstractmethod
    def close(self) -> None:
        """End every connection. When this returns, no thread of the plane touches registered memory. Idempotent."""
