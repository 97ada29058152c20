"""The exception tree of the package.

    KVCacheError
    ├── ConfigError                a setting is wrong
    ├── CacheStateError            a caller broke a contract: always a bug, never a matter of load
    │   ├── UnknownRequestError    the manager does not know the request, or it has ended
    │   ├── BlockPoolError         a slot was freed twice, or by a caller that does not own it
    │   └── UnsupportedCopyError   no copy path connects the two tiers
    ├── InvariantError             `check()` found damaged state
    ├── PoolInUseError             a resize would take slots from running requests
    ├── OverlayError               FastDeploy differs from what the patch table expects
    ├── TransferError              a copy between tiers failed
    │   ├── LayerSwapTimeoutError  a layer's swap-in timed out
    │   └── RemoteReadError        a read from another server failed
    ├── PeerRefusedError           a prefill or decode peer has a wrong identity or another kind of cache
    ├── StorageError               a store of blocks failed
    ├── ModelError                 a model directory is incomplete or does not fit its configuration
    ├── ModelFetchError            a model cannot be downloaded or converted
    ├── TraceError                 a request trace has a broken line
    ├── MessageVersionError        engine and worker use different versions of a message
    ├── RankGroupError             the tensor-parallel ranks cannot compute together any more
    │   ├── RankLostError          a rank ended or does not answer
    │   └── RanksDisagreeError     two ranks computed different results for the same tokens
    └── WorkerDiedError            the worker process ended while requests needed it

Messages are for people and may change.
"""

from __future__ import annotations

__all__ = [
    "BlockPoolError",
    "CacheStateError",
    "ConfigError",
    "InvariantError",
    "KVCacheError",
    "LayerSwapTimeoutError",
    "MessageVersionError",
    "ModelError",
    "ModelFetchError",
    "OverlayError",
    "PeerRefusedError",
    "PoolInUseError",
    "RankGroupError",
    "RankLostError",
    "RanksDisagreeError",
    "RemoteReadError",
    "StorageError",
    "TraceError",
    "TransferError",
    "UnknownRequestError",
    "UnsupportedCopyError",
    "WorkerDiedError",
]


class KVCacheError(Exception):
    """Base class of every error that this package raises on purpose."""


class ConfigError(KVCacheError, ValueError):
    """A setting is wrong. The message is one line: the setting, its value, and what to do."""


class CacheStateError(KVCacheError):
    """A caller broke a contract of the cache manager; no state was changed."""


class UnknownRequestError(CacheStateError):
    """The manager does not know the request, or it has ended; no state was changed."""


class BlockPoolError(CacheStateError):
    """A slot was freed twice, or by a caller that does not own it; nothing was freed."""


class UnsupportedCopyError(CacheStateError):
    """No copy path connects the two tiers; nothing was copied."""

    def __init__(self, source: str, target: str) -> None:
        super().__init__(f"blocks cannot be copied from the {source} tier to the {target} tier")


class InvariantError(KVCacheError):
    """A `check()` found a broken invariant; the message names it."""


class PoolInUseError(KVCacheError):
    """A pool cannot shrink, because slots above its new end are in use; nothing changed."""


class OverlayError(KVCacheError):
    """FastDeploy differs from what the patch table expects, or the overlay is incomplete; nothing is served."""


class TransferError(KVCacheError):
    """A copy between tiers failed; its target must not be read."""


class LayerSwapTimeoutError(TransferError, TimeoutError):
    """A layer's swap-in did not end within the configured time."""


class RemoteReadError(TransferError):
    """A read from another server failed. Its target holds undefined bytes, and no more will arrive."""


class PeerRefusedError(KVCacheError):
    """A peer has a wrong identity or another kind of cache. The message is one line: both values and what to do."""


class MessageVersionError(KVCacheError):
    """A message between engine and worker has a version that this process cannot read."""

    def __init__(self, what: str, *, found: object, expected: object) -> None:
        super().__init__(
            f"got a {what} of version {found!r}, expected {expected}: engine and worker run different versions of "
            "fastdeploy-kvcache-v1; install one version for both and restart the server"
        )


class StorageError(KVCacheError):
    """A store of blocks is slow, down, full or damaged. The requested blocks count as not stored."""


class ModelError(KVCacheError):
    """A model directory has missing or unreadable files, or they do not fit its configuration."""


class ModelFetchError(KVCacheError):
    """A model cannot be downloaded or converted on this machine. The message is one line: why, and what to do."""


class TraceError(KVCacheError, ValueError):
    """A request trace cannot be read; the message names file and line number."""


class RankGroupError(KVCacheError):
    """The tensor-parallel ranks cannot compute together any more; their worker processes must end."""


class RankLostError(RankGroupError):
    """A rank ended, or sent nothing in time. The message names it."""


class RanksDisagreeError(RankGroupError):
    """Ranks computed different results for the same tokens (a bug); no result of the step may be used."""


class WorkerDiedError(KVCacheError):
    """The worker process ended while requests depended on it."""
