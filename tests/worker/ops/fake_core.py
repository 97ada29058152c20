"""A compiled core whose copy paths have faults: what trials of paths ask of `CompiledOps`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from fastdeploy_kvcache_v1.worker.ops import CopyRuns, LayerRows, cupy_copies, landing
from fastdeploy_kvcache_v1.worker.ops.compiled import CUDA_PATHS, Costs, Path
from tests.gpu.stand_in.in_process import PythonDriver


class HangsError(BaseException):
    """A call that does not return."""


class InlineThread:
    """A thread that has run when it was started, unless it hangs."""

    def __init__(self, target: Callable[[], None], name: str, *, daemon: bool) -> None:
        assert daemon, "a process ends in spite of a call that never returns"
        self._target, self._name = target, name

    def start(self) -> None:
        with contextlib.suppress(HangsError):
            self._target()

    def join(self, seconds: float) -> None:
        assert seconds == 2 * landing.TIME_LIMIT_S


class FakeCore:
    """Copies by CuPy, whatever the path. A fault is how many runs get lost, or what a call of the path raises."""

    def __init__(self, gpu: PythonDriver) -> None:
        self.gpu = gpu
        self.faults: dict[str, int | BaseException] = {}
        self.broken_by: set[str] = set()
        """Paths after which the GPU answers with an error."""
        self.stuck: set[str] = set()
        """Paths whose copies the GPU never makes."""
        self.lacking: set[Path] = set()
        self.used: list[Path] = []
        self.staging = (0, 0)
        self.cuda_paths = frozenset(CUDA_PATHS)
        self._costs = {way: Costs(*[7.0] * len(Costs._fields_)) for way in (True, False)}

    def has_cuda_path(self, path: Path) -> bool:
        return path not in self.lacking

    def allow_cuda_paths(self, paths: list[Path]) -> None:
        self.cuda_paths = frozenset(paths)

    def set_staging(self, address: int, nbytes: int) -> None:
        self.staging = address, nbytes

    def costs(self, *, to_device: bool) -> Costs:
        return Costs.from_buffer_copy(self._costs[to_device])

    def set_costs(self, costs: Costs, *, to_device: bool) -> None:
        self._costs[to_device] = costs

    def swap_cache_per_layer(
        self, targets: LayerRows, sources: LayerRows, runs: CopyRuns, stream: int, path: Path = Path.AUTO
    ) -> None:
        assert not (path is Path.STAGED and targets.on_gpu), "it gathers on the device"
        for rows in (*targets, *sources):
            is_of_a_trial = rows.on_gpu and rows.row_bytes == landing.ROW_BYTES
            assert not is_of_a_trial or self.gpu.owns(rows.address, rows.num_rows * rows.pitch)
        name = path.name.lower()
        fault = self.faults.get(name, 0)
        if isinstance(fault, BaseException):
            raise fault
        self.used.append(path)
        self.gpu.statuses.pop("cuEventQuery", None)
        if name in self.broken_by:
            self.gpu.statuses |= dict.fromkeys(("cuEventQuery", "cuMemHostUnregister", "cuMemFree"), 700)
        if name in self.stuck:
            self.gpu.statuses["cuEventQuery"] = 600
        cupy_copies.swap_cache_per_layer(targets, sources, CopyRuns.of(runs)[fault:], stream)

    def swap_cache_all_layers(self, *_: object) -> None:
        raise AssertionError("not asked for")
