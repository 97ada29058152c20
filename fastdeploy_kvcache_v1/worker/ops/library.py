"""The compiled core: where it is, whether it fits this package, and its C functions. Only ctypes, no framework."""

from __future__ import annotations

import ctypes
import os
from ctypes import POINTER, c_char_p, c_int, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

from ...errors import CacheStateError, ConfigError, InvariantError, TransferError

CORE = Path(__file__).with_name("_core.so")

CHOICE = "FASTDEPLOY_KVCACHE_OPS"
"""Environment variable: `numpy` leaves the compiled core alone."""

ABI = 3
OK, INVALID, OUT_OF_MEMORY, UNAVAILABLE, DRIVER, INTERNAL = range(6)

_ERRORS: dict[int, type[Exception]] = {
    INVALID: CacheStateError,
    OUT_OF_MEMORY: MemoryError,
    UNAVAILABLE: ConfigError,
    DRIVER: TransferError,
    INTERNAL: InvariantError,
}

Callback = ctypes.CFUNCTYPE(c_int64, c_void_p, c_int)

_COPY = [c_void_p, c_void_p, c_int64, c_void_p]
"""targets, sources, entries, plan"""

_CHECKED = {
    "kvswap_plan_slots": [c_void_p, c_void_p, c_int64, POINTER(c_void_p)],
    "kvswap_plan_runs": [c_void_p, c_int64, POINTER(c_void_p)],
    "kvswap_copy": [*_COPY, c_int],
    "kvswap_queue_create": [c_char_p, POINTER(c_uint64)],
    "kvswap_queue_close": [c_uint64],
    "kvswap_queue_begin": [c_uint64],
    "kvswap_queue_copy": [c_uint64, *_COPY, c_int],
    "kvswap_queue_call": [c_uint64, Callback, c_void_p],
    "kvswap_queue_wait": [c_uint64, c_void_p, c_int],
    "kvswap_queue_record": [c_uint64, POINTER(c_void_p)],
    "kvswap_host_alloc": [c_int64, c_int, POINTER(c_void_p)],
    "kvswap_host_free": [c_void_p, c_int64],
    "kvswap_cuda_available": [],
    "kvswap_cuda_allow": [c_int],
    "kvswap_cuda_copy": [*_COPY, c_int, c_int, c_uint64],
    "kvswap_cuda_costs": [c_int, c_void_p],
    "kvswap_cuda_set_costs": [c_int, c_void_p],
    "kvswap_cuda_estimate": [*_COPY, c_int, c_int, c_void_p, POINTER(c_int)],
    "kvswap_cuda_set_staging": [c_uint64, c_int64],
    "kvswap_cuda_synchronize": [c_uint64],
    "kvswap_cuda_ipc_export": [c_uint64, c_void_p],
    "kvswap_cuda_ipc_open": [c_char_p, POINTER(c_uint64)],
    "kvswap_cuda_ipc_close": [c_uint64],
    "kvswap_cuda_device_of": [c_uint64, POINTER(c_int), c_void_p],
    "kvswap_cuda_reaches": [c_int, c_char_p, POINTER(c_int)],
    "kvswap_cuda_copy_ranges": [c_void_p, c_int64, c_int, c_uint64],
    "kvswap_cuda_host_alloc": [c_int64, POINTER(c_void_p)],
    "kvswap_cuda_host_free": [c_void_p],
    "kvswap_cuda_host_register": [c_void_p, c_int64],
    "kvswap_cuda_host_unregister": [c_void_p],
}
"""Functions that return a code: `Library.call` raises for it."""

_PLAIN: dict[str, tuple[Any, list[Any]]] = {
    "kvswap_abi": (c_int, []),
    "kvswap_sources": (c_char_p, []),
    "kvswap_last_error": (c_char_p, []),
    "kvswap_plan_size": (c_int64, [c_void_p]),
    "kvswap_plan_data": (c_void_p, [c_void_p]),
    "kvswap_plan_free": (None, [c_void_p]),
    "kvswap_queue_stop": (None, []),
    "kvswap_event_wait": (c_int, [c_void_p, c_int64]),
    "kvswap_event_failure": (c_int64, [c_void_p]),
    "kvswap_event_time_ns": (c_int64, [c_void_p]),
    "kvswap_event_free": (None, [c_void_p]),
    "kvswap_cuda_has_path": (c_int, [c_int]),
    "kvswap_cuda_allowed": (c_int, []),
}


class Library:
    """One loaded core. Every call releases the GIL. Thread-safe.

    Raises `OSError` for a file that is no library, `ConfigError` for one of another version of this package.
    """

    def __init__(self, path: Path = CORE) -> None:
        self.path = path
        self.raw = ctypes.CDLL(str(path))
        try:
            abi = self.raw.kvswap_abi()
            if abi == ABI:
                for name, arguments in _CHECKED.items():
                    getattr(self.raw, name).argtypes = arguments
                for name, (result, arguments) in _PLAIN.items():
                    function = getattr(self.raw, name)
                    function.restype, function.argtypes = result, arguments
        except AttributeError as error:
            raise ConfigError(f"{path.name} is not the core of this package: {error}") from None
        if abi != ABI:
            raise ConfigError(f"{path.name} has ABI version {abi}, this package needs {ABI}: build it again")

    def call(self, name: str, *arguments: object) -> None:
        """Raises the package's error for a code other than OK: nothing was copied then, but for `TransferError`."""
        code = getattr(self.raw, name)(*arguments)
        if code != OK:
            raise _ERRORS[code](self.raw.kvswap_last_error().decode(errors="replace"))

    @property
    def sources(self) -> str:
        """Digest of the sources it was built from."""
        digest: bytes = self.raw.kvswap_sources()
        return digest.decode()


def load() -> tuple[Library | None, str]:
    """The core beside this file, or None and the reason in one line."""
    if os.environ.get(CHOICE) == "numpy":
        return None, f"{CHOICE} says so"
    if not CORE.exists():
        return None, "they were not built (docs/native-ops.md says how)"
    try:
        return Library(), ""
    except (OSError, ConfigError) as error:
        return None, str(error)
