"""What this machine is, and what the trial of the ways to copy finds on it: the first lines of every report."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from typing import Any

import copy_gpu
import cupy
import numpy as np

import fastdeploy_kvcache_v1
from fastdeploy_kvcache_v1.worker.cuda import trial
from fastdeploy_kvcache_v1.worker.cuda.copies import PTX


def machine() -> dict[str, Any]:
    runtime = cupy.cuda.runtime
    gpu = runtime.getDeviceProperties(0)
    return {
        "gpu": gpu["name"].decode(),
        "capability": f"{gpu['major']}.{gpu['minor']}",
        "driver": trial.driver_release() or "unknown",
        "cuda_of_driver": runtime.driverGetVersion(),
        "cuda_of_cupy": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "load": round(os.getloadavg()[0], 2),
        "package": fastdeploy_kvcache_v1.__version__,
        "code": copy_gpu.digest(),
        "ptx": PTX.read_text(encoding="utf-8").splitlines()[0],
    }


def ways_that_are_used() -> dict[str, Any]:
    rates = trial.rates_of(0, ())
    return {"ways": ", ".join(rates.paths), "left": dict(rates.left)}


CHECKS: dict[str, Callable[[], dict[str, Any]]] = {
    "machine": machine,
    "ways that are used": ways_that_are_used,
}
