"""SharedConnections: one instance of the SDK for all threads of a rank, and per namespace."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ..namespace import Namespace
from .sdk import SdkConnection

__all__ = ["Lease", "SharedConnections"]


class Lease:
    """A share of a connection. Satisfies `lane.Connection`."""

    def __init__(self, sdk: SdkConnection, namespace: Namespace, end: Callable[[], None]) -> None:
        self.sdk = sdk
        self.namespace = namespace
        self._end: Callable[[], None] | None = end

    def close(self) -> None:
        """Idempotent."""
        end, self._end = self._end, None
        if end is not None:
            end()


class SharedConnections:
    """Thread-safe. An instance of the SDK stands for a shard of a model on a device: two would be two of them."""

    def __init__(self, connect: Callable[[Namespace], SdkConnection]) -> None:
        self._connect = connect
        self._lock = threading.Lock()
        self._open: dict[str, SdkConnection] = {}
        self._num_leases: dict[str, int] = {}

    def open(self, namespace: Namespace) -> Lease:
        """Raises what connecting raises. Others that open wait meanwhile."""
        with self._lock:
            sdk = self._open.get(namespace.digest)
            if sdk is None:
                sdk = self._open[namespace.digest] = self._connect(namespace)
            self._num_leases[namespace.digest] = self._num_leases.get(namespace.digest, 0) + 1
        return Lease(sdk, namespace, lambda: self._close(namespace.digest))

    def _close(self, digest: str) -> None:
        with self._lock:
            self._num_leases[digest] -= 1
            if not self._num_leases[digest]:
                del self._num_leases[digest], self._open[digest]

    def __len__(self) -> int:
        return len(self._open)
