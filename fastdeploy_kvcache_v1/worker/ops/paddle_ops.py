"""FastDeploy's swap operators for Paddle, and the worker's copies by them. Registered at the first call, with Paddle.

The operators have upstream's names, arguments and meaning:

    swap_cache_per_layer, swap_cache_per_layer_async (cache_gpu, cache_cpu_ptr, max_block_num_cpu,
        swap_block_ids_gpu, swap_block_ids_cpu, rank, mode)
    swap_cache_all_layers (cache_gpu_tensors, cache_cpu_ptrs, the rest the same)

Cache tensors are `[num_blocks, ...]`, of any dtype, contiguous and without gradient, and are changed in place; a host
buffer holds `max_block_num_cpu` blocks of the same size, one behind the other. `mode` 0 copies to the host, 1 to the
device. Tensors on a GPU are copied on Paddle's current stream, from and to page-locked memory, and only
`swap_cache_per_layer_async` does not wait for it: both sides must outlive its copy. `rank` is for upstream's callers,
the tensors know their GPU. Tensors on a CPU have been copied on return. Who raises has copied nothing.
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
    """Register the operators; the library. Raises `ConfigError` where they were not built, do not fit this Paddle, or
    where another package has registered one of the names: Paddle ends the process when a name is registered twice."""
    import paddle

    core = paddle.base.core
    if taken := [name for name in OPERATORS if _is_registered(core, name)]:
        raise ConfigError(f"another package has registered Paddle operators named {', '.join(taken)}: unload it first")
    if not library.exists():
        raise ConfigError(f"{library.name} is not built: run scripts/build_ops.sh (docs/develop/copies.md)")
    try:
        # Says in one line what does not fit, where Paddle would blame the CUDA installation.
        built = ctypes.CDLL(str(library))
        built.kvcache_paddle.restype = ctypes.c_char_p
        require_same_paddle(library, built.kvcache_paddle().decode(), installed_paddle())
        core.load_op_meta_info_and_register_op(str(library))
    except (AttributeError, OSError, RuntimeError) as error:
        raise ConfigError(f"{library.name} does not fit this Paddle: {_first_line(error)}") from None
    return built


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


def copies_on_gpu() -> bool:
    """Whether they were built with nvcc, for tensors on a GPU, too. Raises as `load`."""
    return bool(load().kvcache_copies_on_gpu())


def run(operator: str, caches: Any, *arguments: Any) -> None:
    """Call an operator with upstream's arguments; `caches` is a tensor, or for all layers a list. Raises as `load`, and
    `CacheStateError`."""
    load()
    import paddle

    tensors = caches if isinstance(caches, list) else [caches]
    # Paddle ends the process over an empty list, and hands an operator a contiguous copy of a tensor that is not, so
    # that what is written there is lost.
    if not tensors or not all(tensor.is_contiguous() and tensor.stop_gradient for tensor in tensors):
        raise CacheStateError("a swap needs cache tensors that are contiguous and without gradient")
    try:
        paddle._C_ops._run_custom_op(operator, caches, *arguments)
    except OSError as error:  # how an operator's own checks come out
        raise CacheStateError(_first_line(error)) from None


class PaddleCopies(Copies):
    """The worker's copies between the tensors of its device tier and its host pool. Thread-safe on a CPU; on a GPU one
    thread submits at a time, because Paddle's current stream is that of the process.

    The operators know dense host buffers, and blocks of the pool are a pitch apart: a block's number is counted in rows
    there. Raises `ConfigError` where a pitch is not a number of rows (scales or trailers make it so), or where the
    operators were not built for such tensors.
    """

    def __init__(self, device: Sequence[LayerRows], host: Sequence[LayerRows]) -> None:
        super().__init__(device, host)
        load()
        self._roles = [_Role.of(*pair, number // self._num_roles) for number, pair in enumerate(self._pairs[True])]
        if device[0][0].on_gpu and not copies_on_gpu():
            raise ConfigError(
                f"{LIBRARY.name} was built without nvcc, for a CPU: run scripts/build_ops.sh paddle with it"
            )

    def _copy(self, stream: Any, first: int, end: int, spans: CopySpans, to_device: bool) -> None:
        """Enqueued on `stream` on a GPU, else done on return. Upstream's operator for all layers would wait for it."""
        device, host = (spans.targets, spans.sources) if to_device else (spans.sources, spans.targets)
        with _current_stream(self._roles[first].cache, stream):
            for role in self._roles[first:end]:
                numbers = (host * role.rows_per_block).tolist()
                arguments = (role.address, role.max_blocks, device.tolist(), numbers, 0, int(to_device))
                run("swap_cache_per_layer_async", role.cache, *arguments)


class _Role(NamedTuple):
    """One cache tensor and its rows in the pool."""

    cache: Any
    address: int
    rows_per_block: int
    max_blocks: int

    @classmethod
    def of(cls, device: BlockRows, host: BlockRows, layer: int) -> _Role:
        if host.pitch % host.row_bytes:
            raise ConfigError(
                f"Paddle's operators need host blocks of whole rows, and one of {host.pitch} bytes has rows of "
                f"{host.row_bytes} in layer {layer}: unset FASTDEPLOY_KVCACHE_OPS"
            )
        rows = host.pitch // host.row_bytes
        return cls(device.owner, host.address, rows, (host.num_rows - 1) * rows + 1)


def _current_stream(cache: Any, stream: Any) -> Any:
    """Makes `stream` Paddle's current one, which is the process's, on the GPU of `cache`."""
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
