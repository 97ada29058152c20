"""The fake driver's functions (custom_ops/tests/async_driver), called as CuPy calls the real one's."""

from __future__ import annotations

import ctypes
import itertools
import traceback
from collections.abc import Callable
from ctypes import c_char_p, c_int, c_uint64, c_void_p
from typing import Any

library = ctypes.CDLL("libcuda.so.1")

BATCH_VERSION = 12080

Body = ctypes.CFUNCTYPE(c_int, c_void_p, c_uint64)

_CONTROLS: dict[str, tuple[Any, list[Any]]] = {
    "fake_run_all": (None, []),
    "fake_num_mapped": (c_uint64, []),
    "fake_gpus": (None, [c_int, c_int, c_int]),
    "fake_launch": (c_int, [c_uint64, Body, c_void_p, c_uint64, c_int]),
    "fake_resolve": (c_void_p, [c_uint64, c_uint64]),
    "fake_faults": (c_char_p, []),
}
for _name, (_result, _arguments) in _CONTROLS.items():
    getattr(library, _name).restype, getattr(library, _name).argtypes = _result, _arguments

_functions: dict[str, Any] = {}


class CUDARuntimeError(RuntimeError):
    """As CuPy's: `status` is CUDA's number."""

    def __init__(self, status: int, call: str) -> None:
        super().__init__(f"cudaError{status}: {call}")
        self.status = status


def function(name: str) -> Any:
    if name not in _functions:
        address, status = c_void_p(), c_int()
        library.cuGetProcAddress_v2(
            name.encode(), ctypes.byref(address), BATCH_VERSION, c_uint64(0), ctypes.byref(status)
        )
        assert address.value, f"the fake driver lacks {name}"
        _functions[name] = ctypes.CFUNCTYPE(c_int)(address.value)
    return _functions[name]


def status_of(name: str, *arguments: Any) -> int:
    """Integers go as 64 bits: addresses, handles and sizes. Names what has another width."""
    converted = [c_uint64(each) if isinstance(each, int) else each for each in arguments]
    result: int = function(name)(*converted)
    return result


def call(name: str, *arguments: Any) -> None:
    """Raises `CUDARuntimeError`."""
    status = status_of(name, *arguments)
    if status:
        raise CUDARuntimeError(status, name)


def new_handle(name: str, *arguments: Any) -> int:
    made = c_uint64()
    call(name, ctypes.byref(made), *arguments)
    return made.value


# ---- kernels

_bodies: dict[int, Callable[[], None]] = {}
_numbers = itertools.count(1)

problems: list[str] = []
"""What a kernel's body raised."""


@Body
def _run(number: int, piece: int) -> int:
    try:
        if piece == 0:
            _bodies.pop(number)()
        return 0
    except Exception:  # the edge to C: the context is broken then, as by a kernel that crashed
        problems.append(traceback.format_exc())
        return 719


def launch(stream: int, body: Callable[[], None], pieces: int = 1) -> None:
    """Run `body` when the stream comes to it."""
    number = next(_numbers)
    _bodies[number] = body
    status = library.fake_launch(stream, _run, number, pieces, 1)
    if status:
        raise CUDARuntimeError(status, "cuLaunchKernel")


def resolve(address: int, nbytes: int) -> int:
    found = library.fake_resolve(address, nbytes)
    if not found:
        raise CUDARuntimeError(700, f"a kernel reads {nbytes} bytes at {address:#x}")
    return int(found)


release = status_of
"""The finalizer of a handle or an allocation."""


def faults() -> list[str]:
    """What the driver held against its callers, and what kernels raised."""
    return [*library.fake_faults().decode().splitlines(), *problems]
