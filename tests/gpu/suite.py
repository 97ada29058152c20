"""The CUDA suite: every way to copy, and what the worker makes of them. `scripts/test-gpu` runs it; it needs no pytest.

Each check prints one line. Exit status 1 when one failed.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from types import ModuleType

import copy_checks

from fastdeploy_kvcache_v1.worker.ops.rates import WAYS


def checks() -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Which way the copies go, what is checked, and how."""
    worker = optional("worker_checks")
    for way in WAYS:
        for check in (*copy_checks.CHECKS, *(worker.OF_EVERY_WAY if worker else ())):
            yield way, check.__name__, partial(check, way)
    for module in filter(None, (worker, optional("ipc_checks"), optional("flash_checks"))):
        for title, alone in module.CHECKS.items():
            yield "", title, alone


def optional(name: str) -> ModuleType | None:
    """A file of checks that needs more packages than NumPy and CuPy."""
    try:
        return import_module(name)
    except ImportError as error:
        print(f"left out: {name}: {error}")
        return None


def main() -> int:
    logging.disable()  # copies that are made to fail say so; what was left out is printed here
    failed = 0
    for way, name, check in checks():
        try:
            check()
            print(f"ok      {way:8} {name}", flush=True)
        except Exception:  # the edge of one check: the others still run
            failed += 1
            print(f"FAILED  {way:8} {name}\n{traceback.format_exc()}", flush=True)
    print(f"{failed} failed" if failed else "all passed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
