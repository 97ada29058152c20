"""The copies as Paddle operators, for hosts that hold Paddle tensors. Registered at the first call, with Paddle.

`caches` are tensors `[num_blocks, ...]`, contiguous, without gradient, all in GPU or all in CPU memory, of any dtype:
the roles of one layer, or the flat list of all layers. They are changed in place and must live until the copy is done.
`stream` is a raw CUDA stream for GPU tensors, 0 for Paddle's current one; for CPU tensors the id of a queue of the
core, or 0, the calling thread.
A call raises the same errors as the other ops, before a byte moves.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CacheStateError, ConfigError
from .compiled import CompiledOps
from .rows import BlockRows, CopyRun, LayerRows

LIBRARY = Path(__file__).with_name("_paddle_ops.so")

OPERATORS = (
    "swap_cache_per_layer",
    "swap_cache_per_layer_async",
    "swap_cache_all_layers",
    "swap_cache_rows",
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
        built = ctypes.CDLL(
            str(library)
        )  # says in one line what does not fit; Paddle would blame the CUDA installation
        require_same_paddle(library, _version_built_for(built), installed_paddle())
        core.load_op_meta_info_and_register_op(str(library))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{library.name} does not fit this Paddle: {_first_line(error)}") from None
    _registered_here.append(library)


def installed_paddle() -> str:
    """Release and commit, as `custom_ops/build.py` puts them into the library."""
    import paddle

    return f"{paddle.version.full_version}+{paddle.version.commit}"


def require_same_paddle(library: Path, built_for: str, installed: str) -> None:
    """Raises `ConfigError`: a tensor of another Paddle may look different inside."""
    if built_for != installed:
        raise ConfigError(
            f"{library.name} was built for Paddle {built_for or 'unknown'}, this is {installed}: run "
            "scripts/build_ops.sh paddle"
        )


def _version_built_for(library: ctypes.CDLL) -> str:
    try:
        version = library.kvswap_paddle_version
    except AttributeError:
        return ""
    version.restype, version.argtypes = ctypes.c_char_p, []
    return str(version().decode())


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


class PaddleOps:
    """The ops as Paddle operators, with the arguments of `CompiledOps`. The device side's rows are owned by tensors.

    Raises `ConfigError` where the operators are not built, or for another Paddle. Thread-safe as the core is.
    """

    def __init__(self, compiled: CompiledOps) -> None:
        load()
        self._compiled = compiled

    def swap_cache_per_layer(
        self, targets: LayerRows, sources: LayerRows, runs: Sequence[CopyRun], stream: int
    ) -> None:
        self._copy(targets, sources, runs, stream)

    def swap_cache_all_layers(
        self, targets: Sequence[LayerRows], sources: Sequence[LayerRows], runs: Sequence[CopyRun], stream: int
    ) -> None:
        self._copy(list(chain.from_iterable(targets)), list(chain.from_iterable(sources)), runs, stream)

    def _copy(
        self, targets: Sequence[BlockRows], sources: Sequence[BlockRows], runs: Sequence[CopyRun], stream: int
    ) -> None:
        to_device = _is_tensor(targets[0].owner)
        device, host = (targets, sources) if to_device else (sources, targets)
        rows = [number for row in host for number in (row.address, row.num_rows, row.row_bytes, row.pitch)]
        plan = self._compiled.plan(runs)
        _run("swap_cache_rows", _in_place([row.owner for row in device]), rows, plan.handle.value, to_device, stream)


def _is_tensor(owner: Any) -> bool:
    return hasattr(owner, "stop_gradient")  # NumPy arrays, the other owners of rows, have none


def _in_place(caches: Sequence[Any]) -> list[Any]:
    """Paddle hands an operator a contiguous copy of a tensor that is not, and what is written there is lost."""
    if not caches or not all(cache.is_contiguous() and cache.stop_gradient for cache in caches):
        raise CacheStateError("a copy needs cache tensors that are contiguous and without gradient")
    return list(caches)


def _stream(caches: Sequence[Any], stream: int) -> int:
    if stream or not caches or not caches[0].place.is_gpu_place():
        return stream
    import paddle

    return int(paddle.device.cuda.current_stream().cuda_stream)


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
        _stream(caches, stream),
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
    _run("swap_cache_per_layer_async", _in_place(caches), *host, offset, *slots, to_device, _stream(caches, stream))


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
    slots = (list(device_slots), list(host_slots))
    _run("swap_cache_all_layers", _in_place(caches), *host, *slots, to_device, _stream(caches, stream))


def cuda_host_alloc(nbytes: int) -> Any:
    """Page-locked host memory, plain pages where there is no CUDA driver: an int64 tensor `[1]` with the address."""
    import paddle

    address = paddle.to_tensor([0], dtype="int64", place=paddle.CPUPlace())
    _run("cuda_host_alloc", address, nbytes)
    return address


def cuda_host_free(address: Any) -> None:
    """Give a buffer of `cuda_host_alloc` back; its tensor holds 0 afterwards. Raises the second time."""
    _run("cuda_host_free", address)
