"""Does the simulation notice a forgotten wait? Changes the worker in one place, runs a few seeds, and says who noticed.

`python fake_gpu.py DIRECTORY mutants.py DIRECTORY [NAME ...]`; without names all changes, and once none. Each lives in
a process of its own: a child that was forked before the package was imported, whose importer changes a module's text.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import logging
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_gpu
from changes import Change, read

PACKAGE = "fastdeploy_kvcache_v1"
FORGOTTEN = read(Path(__file__).with_name("forgotten_waits.txt"))
SEEDS, STEPS = range(1, 16), 150
LIMIT_S = 100
"""A change that loops is noticed, too."""

NOTICED, SURVIVED, INVALID = 0, 10, 11


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module with another text. Raises `LookupError` as the change does."""

    def __init__(self, change: Change) -> None:
        self.path = fake_gpu.ROOT / PACKAGE / change.file
        self.name = f"{PACKAGE}/{change.file}".removesuffix(".py").replace("/", ".")
        self.source = change.applied_to(self.path.read_text(encoding="utf-8"))

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, str(self.path), "exec"), vars(module))


def try_seeds(directory: Path, change: Change | None) -> tuple[int, str]:
    """How it ended, and what noticed it."""
    if change is not None:
        try:
            sys.meta_path.insert(0, _Changed(change))
        except LookupError as error:
            return INVALID, str(error)
    for seed in SEEDS:
        try:
            fake_gpu.simulate(directory, seed, STEPS)
        except (NameError, AttributeError, ImportError, SyntaxError, TypeError):
            return INVALID, traceback.format_exc()
        except Exception as error:  # whatever the simulation, the driver or the package itself finds
            return NOTICED, f"seed {seed}: {type(error).__name__}: {error}".splitlines()[0]
    return SURVIVED, ""


def outcome(directory: Path, change: Change | None) -> tuple[int, str]:
    """`try_seeds` in a child."""
    readable, writable = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(LIMIT_S)
        logging.disable()
        code, text = try_seeds(directory, change)
        os.write(writable, text.encode()[:4000])
        os._exit(code)
    os.close(writable)
    with os.fdopen(readable) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):  # a wild address, or a loop
        return NOTICED, f"signal {os.WTERMSIG(status)}"
    return os.WEXITSTATUS(status), text


def main(directory: Path, names: Sequence[str]) -> int:
    code, text = (SURVIVED, "") if names else outcome(directory, None)
    if code != SURVIVED:
        print(f"INVALID without a change: {text}")
        return 1
    words = {NOTICED: "noticed ", SURVIVED: "SURVIVED", INVALID: "INVALID "}
    bad = 0
    for change in FORGOTTEN:
        if not names or change.name in names:
            code, text = outcome(directory, change)
            bad += code != NOTICED
            print(f"{words.get(code, 'INVALID ')} {change.name}: {text}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
