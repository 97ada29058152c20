"""Settings that make the math library repeat results bit for bit. Effective before paddle's first import only."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

MAX_DEFAULT_THREADS = 2
"""`--threads` asks for more."""


def default_threads() -> int:
    """Physical cores of this process minus one for server and copies, up to a limit. On two busy cores, two threads
    took twice as long as one.
    """
    cores = psutil.cpu_count(logical=False) or 1
    return max(1, min(MAX_DEFAULT_THREADS, cores - 1, len(os.sched_getaffinity(0)) - 1))


def configure_reproducible_math(num_threads: int = 1) -> bool:
    """Fix the instruction set, rounding mode and thread count of the math library through environment variables.

    `MKL_CBWR` gets its strict mode: the same instructions for a GEMM with any alignment and number of threads. On AMD
    processors MKL would take its slowest kernels, so AVX2 is forced. Idle threads sleep, because copies and servers
    need the cores too. Variables that are set are kept. Returns False, without a change, if paddle is loaded: a token's
    result may then depend on its batch.
    """
    if "paddle" in sys.modules:
        logger.warning("paddle is loaded already: the math library keeps its default mode")
        return False
    settings = {
        "OMP_NUM_THREADS": "1",  # paddle's own loops; it warns about any other number
        "MKL_NUM_THREADS": str(num_threads),
        "OPENBLAS_NUM_THREADS": "1",
        "KMP_BLOCKTIME": "0",
        "OMP_DYNAMIC": "FALSE",
        "MKL_DYNAMIC": "FALSE",
        **mkl_settings(Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n", 1)[0]),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    return True


def mkl_settings(cpu: str) -> dict[str, str]:
    """For a processor described as in /proc/cpuinfo."""
    words = cpu.split()
    if "avx2" not in words:
        return {"MKL_CBWR": "COMPATIBLE"}
    settings = {"MKL_CBWR": "AVX2,STRICT"}
    if "AuthenticAMD" in words:
        settings["MKL_DEBUG_CPU_TYPE"] = "5"
    return settings
