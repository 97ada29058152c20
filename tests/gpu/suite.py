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
from device import Way, copies_by, core, land, ways


def checks() -> Iterator[tuple[str, str, Callable[[], object]]]:
    """Which way the copies go, what is checked, and how."""
    worker = optional("worker_checks")
    for name, way in ways().items():
        for check in copy_checks.CHECKS:
            yield name, check.__name__, partial(check, name, way)
        for of_worker in worker.OF_EVERY_PATH if worker else ():
            yield name, of_worker.__name__, partial(by, way, of_worker)
    for module in filter(None, (worker, optional("ipc_checks"), optional("flash_checks"))):
        for title, alone in module.CHECKS.items():
            yield "auto", title, alone


def optional(name: str) -> ModuleType | None:
    """A file of checks that needs more packages than NumPy and CuPy."""
    try:
        return import_module(name)
    except ImportError as error:
        print(f"left out: {name}: {error}")
        return None


def by(way: Way, check: Callable[[], object]) -> None:
    with copies_by(way):
        check()


def main() -> int:
    logging.disable()  # copies that are made to fail say so; what was left out is printed here
    print(f"core {core().library.sources}, paths: {', '.join(land().live)}")
    for name, reason in land().left.items():
        print(f"left out: {name}: {reason}")
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
