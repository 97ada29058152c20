"""The exception tree of the package.

KVCacheError
├── ConfigError                a setting is wrong; the message says which and what to do
├── CacheStateError            the caller broke a contract (a bug, never a load condition)
│   ├── UnknownRequestError    the request is not (or no longer) known to the manager
│   ├── BlockPoolError         a slot was freed twice, or by a caller that does not own it
│   └── UnsupportedCopyError   blocks are to be copied between two tiers that no copy path connects
├── InvariantError             `check()` found damaged state
├── PoolInUseError             a resize would take slots from running requests; nothing changed
├── OverlayError               FastDeploy differs from what the patch table expects; nothing is served
├── TransferError              a copy between tiers failed; its target must not be read
│   ├── LayerSwapTimeoutError  a layer's swap-in did not arrive in time
│   └── RemoteReadError        blocks of another server were not read; no byte of them arrives any more
├── PeerRefusedError           a prefill or decode peer is not who it should be, or its cache does not fit ours
├── StorageError               a store of blocks failed; what was asked for counts as not stored
├── ModelError                 a model directory is incomplete or does not fit its configuration
├── ModelFetchError            a model cannot be downloaded or converted here; the message says what to do
├── TraceError                 a request trace has a broken line (named by its number)
├── MessageVersionError        engine and worker speak different versions of a message
├── RankGroupError             the tensor-parallel ranks cannot compute together any more
│   ├── RankLostError          one of them ended or does not answer
│   └── RanksDisagreeError     two of them computed something else for the same tokens
└── WorkerDiedError            the worker process ended while requests needed it
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
    """Base class of every error this package raises on purpose."""


class ConfigError(KVCacheError, ValueError):
    """A setting is wrong. One line: what is wrong and what to do."""


class CacheStateError(KVCacheError):
    """A caller broke a contract of the cache manager; no state was changed."""


class UnknownRequestError(CacheStateError):
    """The request is unknown to the manager, or has been finished already."""


class BlockPoolError(CacheStateError):
    """A slot was released that is not allocated (double free or foreign id); nothing was freed."""


class UnsupportedCopyError(CacheStateError):
    """No copy path connects the two tiers; nothing was copied."""

    def __init__(self, source: str, target: str) -> None:
        super().__init__(f"blocks cannot be copied from the {source} tier to the {target} tier")


class InvariantError(KVCacheError):
    """A `check()` found a broken invariant; the message names it."""


class PoolInUseError(KVCacheError):
    """A pool cannot shrink because running requests hold slots above its new end; nothing changed."""


class OverlayError(KVCacheError):
    """FastDeploy differs from what the patch table was written for, or the overlay is not completely applied."""


class TransferError(KVCacheError):
    """A copy between tiers failed. Its target holds no valid data."""


class LayerSwapTimeoutError(TransferError, TimeoutError):
    """A layer's swap-in did not complete within the configured time."""


class RemoteReadError(TransferError):
    """A read from another server failed. What it should have filled holds anything; no byte arrives any more."""


class PeerRefusedError(KVCacheError):
    """A peer is not who it should be, or its cache does not fit ours. One line: both values and what to do."""


class MessageVersionError(KVCacheError):
    """A message between engine and worker has a version that this process cannot read."""

    def __init__(self, what: str, *, found: object, expected: object) -> None:
        super().__init__(
            f"a {what} has version {found!r}, this process reads version {expected}: engine and worker run different "
            "versions of fastdeploy-kvcache-v1; install one version for both and restart the server"
        )


class StorageError(KVCacheError):
    """A store of blocks failed: slow, down, full, or damaged. What was asked for counts as not stored."""


class ModelError(KVCacheError):
    """A model directory has missing, unreadable or mismatched files."""


class ModelFetchError(KVCacheError):
    """A model cannot be downloaded or converted on this machine. One line: why, and what to do."""


class TraceError(KVCacheError, ValueError):
    """A request trace cannot be read; the message names file and line number."""


class RankGroupError(KVCacheError):
    """The tensor-parallel ranks cannot compute together any more: their worker processes must end."""


class RankLostError(RankGroupError):
    """A rank ended, or sent nothing in time. One line: which one."""


class RanksDisagreeError(RankGroupError):
    """Ranks that must compute the same did not (a bug): nothing of the step may be used."""


class WorkerDiedError(KVCacheError):
    """The worker process ended while requests depended on it."""
