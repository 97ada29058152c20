"""Import time of the scheduler half, in fresh interpreters, beside interpreters that import nothing."""

from __future__ import annotations

import subprocess
import sys
from time import perf_counter

from _support import ROOT, begin, median, sized

STARTS = sized(15, 1)
SCHEDULER_HALF = "from fastdeploy_kvcache_v1.scheduler import cache_manager"
PROGRAM = "import time; begin = time.perf_counter(); {}; print(time.perf_counter() - begin)"


def start(statement: str) -> tuple[float, float]:
    """Seconds inside the import, and of the whole process."""
    begin = perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(statement)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return float(done.stdout), perf_counter() - begin


def main() -> None:
    run = begin()
    imports, processes, bare = [], [], []
    for _ in range(STARTS):
        inside, whole = start(SCHEDULER_HALF)
        imports.append(inside)
        processes.append(whole)
        bare.append(start("pass")[1])
    run.save(
        {
            "import_ms": 1e3 * median(imports),
            "process_ms": 1e3 * median(processes),
            "bare_process_ms": 1e3 * median(bare),
        },
    )


if __name__ == "__main__":
    main()
