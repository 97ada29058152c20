"""Settings that make the math library repeat itself, bit for bit. They work only before paddle is first imported."""

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
    """Threads to compute with by default: the physical cores that this process may use but one, up to a limit.

    One core is left for the server and the copies: on a busy machine of two cores, two threads took twice as long as
    one.
    """
    cores = psutil.cpu_count(logical=False) or 1
    return max(1, min(MAX_DEFAULT_THREADS, cores - 1, len(os.sched_getaffinity(0)) - 1))


def configure_reproducible_math(num_threads: int = 1) -> bool:
    """Fix the instruction set, rounding mode and thread count of the math library through environment variables.

    `MKL_CBWR` gets its strict mode: a GEMM uses the same instructions for any alignment and any number of threads. On
    AMD processors, MKL otherwise picks its slowest kernels, so it is told that AVX2 is there. Idle threads sleep at
    once, because copies and servers need the cores too. Variables that are set already are left alone. Returns False,
    changing nothing, if paddle is loaded already: the library keeps its default mode, and a token may depend on others
    in its batch.
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
