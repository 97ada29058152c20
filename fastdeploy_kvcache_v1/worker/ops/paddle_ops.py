"""FastDeploy's swap operators for Paddle, registered at the first call, and the worker's copies by them.

The operators have upstream's names, arguments and meaning:

    swap_cache_per_layer, swap_cache_per_layer_async (cache_gpu, cache_cpu_ptr, max_block_num_cpu,
        swap_block_ids_gpu, swap_block_ids_cpu, rank, mode)
    swap_cache_all_layers (cache_gpu_tensors, cache_cpu_ptrs, the rest the same)

Cache tensors are `[num_blocks, ...]`, of any dtype, contiguous, without gradient, and change in place. A host buffer
holds `max_block_num_cpu` blocks of the same size, densely. `mode` 0 copies to the host, 1 to the device. `rank` is
ignored. On a GPU, copies run on Paddle's current stream with page-locked memory; only `swap_cache_per_layer_async` does
not wait for them: both sides must outlive its copy. On a CPU they have ended on return. An error copies nothing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CacheStateError, ConfigError
from .copies import Copies
from .rows import BlockRows, CopySpans, LayerRows

LIBRARY = Path(__file__).with_name("_paddle_ops.so")
OPERATORS = ("swap_cache_per_layer", "swap_cache_per_layer_async", "swap_cache_all_layers")


@cache
def load(library: Path = LIBRARY) -> Any:
    """Register the operators and return the library.

    Raises `ConfigError` if it was not built, does not fit this Paddle, or if another package has registered one of the
    names: Paddle ends the process over a second registration.
    """
    import paddle

    core = paddle.base.core
    if taken := [name for name in OPERATORS if _is_registered(core, name)]:
        raise ConfigError(f"another package has registered Paddle operators named {', '.join(taken)}: unload it first")
    if not library.exists():
        raise ConfigError(f"{library.name} is not built: run scripts/build_ops.sh (docs/develop/copies.md)")
    try:
        # Checked here, because Paddle would blame the CUDA installation.
        built = ctypes.CDLL(str(library))
        built.kvcache_paddle.restype = ctypes.c_char_p
        require_same_paddle(library, built.kvcache_paddle().decode(), installed_paddle())
        core.load_op_meta_info_and_register_op(str(library))
    except (AttributeError, OSError, RuntimeError) as error:
        raise ConfigError(f"{library.name} does not fit this Paddle: {_first_line(error)}") from None
    return built


def installed_paddle() -> str:
    """Release and commit, as in a library of `custom_ops/build.py`."""
    import paddle

    return f"{paddle.version.full_version}+{paddle.version.commit}"


def require_same_paddle(library: Path, built_for: str, installed: str) -> None:
    """Raises `ConfigError` if they differ: a tensor of another Paddle may have another layout."""
    if built_for != installed:
        raise ConfigError(
            f"got {library.name} for Paddle {built_for or 'unknown'}, expected one for {installed}: run "
            "scripts/build_ops.sh paddle"
        )


def copies_on_gpu() -> bool:
    """True if they were built with nvcc, for tensors on a GPU. Raises as `load`."""
    return bool(load().kvcache_copies_on_gpu())


def run(operator: str, caches: Any, *arguments: Any) -> None:
    """Call an operator with upstream's arguments; `caches` is a tensor, or a list for all layers.

    Raises as `load`, and `CacheStateError` for arguments that do not fit.
    """
    load()
    import paddle

    tensors = caches if isinstance(caches, list) else [caches]
    # Paddle ends the process over an empty list, and writes to a copy of a tensor that is not contiguous.
    if not tensors or not all(tensor.is_contiguous() and tensor.stop_gradient for tensor in tensors):
        raise CacheStateError("a swap needs cache tensors that are contiguous and without gradient")
    try:
        paddle._C_ops._run_custom_op(operator, caches, *arguments)
    except OSError as error:  # of an operator's checks
        raise CacheStateError(_first_line(error)) from None


class PaddleCopies(Copies):
    """Copies by `swap_cache_per_layer_async`. Thread-safe on a CPU; on a GPU one thread submits at a time, because
    Paddle's current stream belongs to the process.

    The operators need dense host buffers, so a block's number is counted in rows of the pool. Raises `ConfigError` if a
    block is no whole number of rows (scales, trailers), or if the operators were not built for such tensors.
    """

    def __init__(self, device: Sequence[LayerRows], host: Sequence[LayerRows]) -> None:
        super().__init__(device, host)
        load()
        self._roles = [_Role.of(*pair, number // self._num_roles) for number, pair in enumerate(self._pairs[True])]
        if device[0][0].on_gpu and not copies_on_gpu():
            raise ConfigError(
                f"{LIBRARY.name} was built without nvcc, for a CPU: install nvcc, run scripts/build_ops.sh paddle"
            )

    def _copy(self, stream: Any, first: int, end: int, spans: CopySpans, to_device: bool) -> None:
        device, host = (spans.targets, spans.sources) if to_device else (spans.sources, spans.targets)
        with _current_stream(self._roles[first].cache, stream):
            for role in self._roles[first:end]:
                numbers = (host * role.rows_per_block).tolist()
                arguments = (role.address, role.max_blocks, device.tolist(), numbers, 0, int(to_device))
                run("swap_cache_per_layer_async", role.cache, *arguments)


class _Role(NamedTuple):
    """A cache tensor and its rows in the pool."""

    cache: Any
    address: int
    rows_per_block: int
    max_blocks: int

    @classmethod
    def of(cls, device: BlockRows, host: BlockRows, layer: int) -> _Role:
        if host.pitch % host.row_bytes:
            raise ConfigError(
                f"Paddle's operators need host blocks of whole rows, got blocks of {host.pitch} bytes with rows of "
                f"{host.row_bytes} in layer {layer}: unset FASTDEPLOY_KVCACHE_OPS"
            )
        rows = host.pitch // host.row_bytes
        return cls(device.owner, host.address, rows, (host.num_rows - 1) * rows + 1)


def _current_stream(cache: Any, stream: Any) -> Any:
    """Make `stream` the process's current Paddle stream on the GPU of `cache`."""
    if not cache.place.is_gpu_place():
        return nullcontext()
    import paddle

    device = paddle.CUDAPlace(cache.place.gpu_device_id())
    return paddle.device.stream_guard(paddle.device.get_stream_from_external(stream.handle, device))


def _is_registered(core: Any, name: str) -> bool:
    try:
        core.eager._get_custom_operator_inplace_map(name)
    except RuntimeError:
        return False
    return True


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]
