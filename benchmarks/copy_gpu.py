"""Rates of copies between a GPU and page-locked memory, by every copy path, row size, pattern and direction, and what
a pass and copies beside it lose (`copy_gpu/beside_pass.py`).

`us_per_layer` is the CPU time that a layer costs the submitting thread, with its share of what is uploaded once. Rates
are those of the GPU, between two events. No bytes are compared.

On a machine with a GPU `./scripts/test-gpu --benchmark` runs this, a process for each path, and writes a report. In a
checkout of the same commit `./scripts/bench copy_gpu REPORT` keeps it as a result.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import product, starmap
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

ROW_BYTES = (4 << 10, 16 << 10, 64 << 10, 256 << 10)
BLOCKS = (100, 2000)
SLOTS = 2512
"""In each tier."""

RUN = {"scattered": 1, "in 16s": 16, "contiguous": SLOTS}
"""Blocks that are neighbours in both tiers."""

MOST_LAYERS, TURNS = 8, 5


class Case(NamedTuple):
    row_bytes: int
    blocks: int
    pattern: str
    to_device: bool
    layer_by_layer: bool

    @property
    def name(self) -> str:
        how = "by layer" if self.layer_by_layer else "at once"
        direction = "in" if self.to_device else "out"
        return f"{direction}, {self.blocks} x {self.row_bytes >> 10} KB {self.pattern}, {how}"

    def __call__(self, way: str) -> dict[str, float]:
        tiers = Tiers.of(way, self.row_bytes)
        found = [tiers.copy(self, turn) for turn in range(TURNS + 1)][1:]
        nbytes = self.blocks * self.row_bytes * tiers.layers
        return {
            "gb_per_s": round(median(nbytes / seconds / 1e9 for seconds, _spent in found), 3),
            "us_per_layer": round(median(1e6 * spent / tiers.layers for _seconds, spent in found), 1),
        }


class Tiers:
    """Both tiers for rows of one size, and the copies between them."""

    def __init__(self, way: str, row_bytes: int) -> None:
        import cupy
        from device import device_rows, host_rows, runtime

        from fastdeploy_kvcache_v1.worker.runtime.base import free_host_memory

        compute = cupy.cuda.Stream(non_blocking=True)
        self._runtime = runtime(way, compute)
        free = min(int(cupy.cuda.runtime.memGetInfo()[0]), free_host_memory())
        self.layers = max(1, min(MOST_LAYERS, free // (2 * SLOTS * row_bytes)))
        self._tensors = [cupy.empty((SLOTS, row_bytes), cupy.uint8) for _layer in range(self.layers)]
        self._pool = self._runtime.allocate_host(SLOTS * row_bytes * self.layers)
        self._pool.array[:] = 1
        rows = host_rows(self._pool.array, SLOTS, [[row_bytes]] * self.layers)
        self._copies = self._runtime.new_copies([device_rows([tensor]) for tensor in self._tensors], rows)
        self._streams = {to_device: self._runtime.new_stream("copies") for to_device in (True, False)}

    _now: tuple[tuple[str, int], Tiers] | None = None

    @classmethod
    def of(cls, way: str, row_bytes: int) -> Tiers:
        """The tiers of a way and row size. Only the last are kept."""
        if cls._now is None or cls._now[0] != (way, row_bytes):
            if cls._now is not None:
                cls._now[1].close()
                cls._now = None
            cls._now = (way, row_bytes), cls(way, row_bytes)
        return cls._now[1]

    def copy(self, case: Case, turn: int) -> tuple[float, float]:
        """Seconds between the events, and CPU seconds of this thread."""
        import numpy as np

        from fastdeploy_kvcache_v1.worker.ops import plan_spans

        length = RUN[case.pattern]
        starts = np.random.default_rng(turn).permutation(SLOTS // length) * length
        slots = [start + place for start in starts.tolist() for place in range(length)][: case.blocks]
        spans = plan_spans(slots, slots, num_sources=SLOTS, num_targets=SLOTS)
        stream, copies = self._streams[case.to_device], self._copies
        before, start = stream.record_event(timed=True), time.thread_time()
        if case.layer_by_layer:
            for layer in range(self.layers):
                stream.submit(partial(copies.layer, stream, layer, spans, to_device=case.to_device))
        else:
            stream.submit(partial(copies.all_layers, stream, spans, to_device=case.to_device))
        spent, after = time.thread_time() - start, stream.record_event(timed=True)
        after.wait(60)
        return after.seconds_since(before), spent

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()
        self._copies.close()
        self._runtime.free_host(self._pool)


OF_EVERY_WAY: dict[str, Callable[[str], dict[str, float]]] = {
    case.name: case for case in starmap(Case, product(ROW_BYTES, BLOCKS, RUN, (True, False), (True, False)))
}


def table(lines: Iterable[dict[str, Any]]) -> str:
    """The measured values by way, from the lines of a report."""
    rows: dict[str, dict[str, str]] = {}
    for line in lines:
        module, _, way = line["group"].partition("/")
        found = line["measured"]
        if module == "copy_gpu":
            rows.setdefault(line["check"], {})[way] = f"{found['gb_per_s']:.1f} GB/s {found['us_per_layer']:6.0f} us"
        elif module == "beside_pass":
            rows.setdefault(line["check"], {})[way] = f"{found['both_ms']:.1f} ms {found['over']:6.2f} x"
    ways = sorted({way for cells in rows.values() for way in cells})
    rows = {"": {way: way for way in ways}} | rows
    return "\n".join(
        f"{name:46}" + "".join(f"{cells.get(way, ''):>24}" for way in ways) for name, cells in rows.items()
    )


def digest() -> str:
    """Of all files that this benchmark measures and is made of."""
    top = Path(__file__).resolve().parents[1]
    folders = top / "fastdeploy_kvcache_v1/worker", top / "benchmarks/copy_gpu"
    files = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".ptx"))
    found = hashlib.sha256()
    for path in sorted([*files, Path(__file__).resolve()]):
        found.update(path.read_bytes())
    return found.hexdigest()


def kept(report: Path) -> dict[str, Any]:
    """The result that a report holds. Raises `SystemExit` for one of other code than this checkout's, or in part."""
    try:
        lines = [json.loads(line) for line in report.read_text(encoding="utf-8").splitlines()]
        about = next(line["measured"] for line in lines if line["check"] == "machine")
    except (OSError, ValueError, LookupError, StopIteration):
        raise SystemExit(f"error: {report} is no report of ./scripts/test-gpu --benchmark") from None
    if about.get("code") != digest():
        raise SystemExit(f"error: {report.name} measured other code: measure this checkout, or keep it in that one")
    if lost := [line["check"] for line in lines if line["result"] != "ok"]:
        raise SystemExit(f"error: {report.name} lacks {', '.join(lost)}: measure again")
    found: dict[str, Any] = {"copy_gpu": {}, "beside_pass": {}}
    for line in lines:
        module, _, way = line["group"].partition("/")
        if module in found and line.get("measured"):
            found[module].setdefault(line["check"], {})[way] = line["measured"]
    cuda = f"driver {about['driver']}, CuPy {about['cupy']}"
    same = {name: about[name] for name in ("cores", "memory_gib", "python", "system")}
    return {
        "machine": {"cpu": f"{about['gpu']}, {cuda}", **same},
        "load": {"before": about["load"], "after": None},
        "copies": found["copy_gpu"],
        "beside": found["beside_pass"],
    }


def main() -> None:
    from _support import begin

    run = begin(configure=lambda parser: parser.add_argument("report", type=Path, metavar="REPORT"))
    run.save(kept(run.options.report))


if __name__ == "__main__":
    main()
