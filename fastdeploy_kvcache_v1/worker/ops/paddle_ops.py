"""The copies as Paddle operators, for hosts that hold Paddle tensors. Registered at the first call, with Paddle.

`caches` are tensors `[num_blocks, ...]`, contiguous, without gradient, all in GPU or all in CPU memory, of any dtype:
the roles of one layer, or the flat list of all layers. They are changed in place and must live until the copy is done.
`stream` is a raw CUDA stream for GPU tensors; for CPU tensors the id of a queue of the core, or 0, the calling thread.
A call raises the same errors as the other ops, before a byte moves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CacheStateError, ConfigError

LIBRARY = Path(__file__).with_name("_paddle_ops.so")

OPERATORS = (
    "swap_cache_per_layer",
    "swap_cache_per_layer_async",
    "swap_cache_all_layers",
    "cuda_host_alloc",
    "cuda_host_free",
)


class HostBlocks(NamedTuple):
    """A block-major host pool."""

    address: int
    num_blocks: int
    block_bytes: int
    """Bytes of one block, all layers and roles: the distance between two blocks."""


def load(library: Path = LIBRARY) -> None:
    """Register the operators. Raises `ConfigError` where they were not built, do not fit this Paddle, or where another
    package has registered one of the names: Paddle ends the process when a name is registered twice."""
    import paddle

    core = paddle.base.core
    taken = [name for name in OPERATORS if _is_registered(core, name)]
    if len(taken) == len(OPERATORS) and _registered_here:
        return
    if taken:
        raise ConfigError(f"another package has registered Paddle operators named {', '.join(taken)}: unload it first")
    if not library.exists():
        raise ConfigError(f"{library.name} is not built: run scripts/build_ops.sh (docs/native-ops.md)")
    try:
        ctypes.CDLL(str(library))  # says in one line what does not fit; Paddle would blame the CUDA installation
        core.load_op_meta_info_and_register_op(str(library))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{library.name} does not fit this Paddle: {_first_line(error)}") from None
    _registered_here.append(library)


_registered_here: list[Path] = []


def _is_registered(core: Any, name: str) -> bool:
    try:
        core.eager._get_custom_operator_inplace_map(name)
    except RuntimeError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _run(name: str, *arguments: object) -> None:
    load()
    import paddle

    try:
        paddle._C_ops._run_custom_op(name, *arguments)
    except OSError as error:  # how an operator's own checks come out
        raise CacheStateError(_first_line(error)) from None


def _in_place(caches: Sequence[Any]) -> list[Any]:
    """Paddle hands an operator a contiguous copy of a tensor that is not, and what is written there is lost."""
    if not caches or not all(cache.is_contiguous() and cache.stop_gradient for cache in caches):
        raise CacheStateError("a copy needs cache tensors that are contiguous and without gradient")
    return list(caches)


def swap_cache_per_layer(
    caches: Sequence[Any],
    host: HostBlocks,
    offset: int,
    device_slots: Sequence[int],
    host_slots: Sequence[int],
    *,
    to_device: bool,
    stream: int = 0,
) -> None:
    """Copy one layer, whose rows start `offset` bytes into a host block. Done on return."""
    _run(
        "swap_cache_per_layer",
        _in_place(caches),
        *host,
        offset,
        list(device_slots),
        list(host_slots),
        to_device,
        stream,
    )


def swap_cache_per_layer_async(
    caches: Sequence[Any],
    host: HostBlocks,
    offset: int,
    device_slots: Sequence[int],
    host_slots: Sequence[int],
    *,
    to_device: bool,
    stream: int,
) -> None:
    """As `swap_cache_per_layer`, but only enqueued on `stream`."""
    slots = (list(device_slots), list(host_slots))
    _run("swap_cache_per_layer_async", _in_place(caches), *host, offset, *slots, to_device, stream)


def swap_cache_all_layers(
    caches: Sequence[Any],
    host: HostBlocks,
    device_slots: Sequence[int],
    host_slots: Sequence[int],
    *,
    to_device: bool = False,
    stream: int = 0,
) -> None:
    """Enqueue the copy of all layers on `stream`; done on return with stream 0 on the CPU."""
    _run("swap_cache_all_layers", _in_place(caches), *host, list(device_slots), list(host_slots), to_device, stream)


def cuda_host_alloc(nbytes: int) -> Any:
    """Page-locked host memory, plain pages where there is no CUDA driver: an int64 tensor `[1]` with the address."""
    import paddle

    address = paddle.to_tensor([0], dtype="int64", place=paddle.CPUPlace())
    _run("cuda_host_alloc", address, nbytes)
    return address


def cuda_host_free(address: Any) -> None:
    """Give a buffer of `cuda_host_alloc` back; its tensor holds 0 afterwards. Raises the second time."""
    _run("cuda_host_free", address)
