"""The process of `suite.py` for one group: `one_group.py FD MODULE WAY [CHECK...]`, without the checks that are named.

Writes what it does to FD, a line of JSON each, and ends with the first check that fails.
"""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from functools import partial
from importlib import import_module
from typing import Any


def checks_of(module: str, way: str) -> dict[str, Callable[[], Any]]:
    found = import_module(module)
    return {name: partial(check, way) for name, check in found.OF_EVERY_WAY.items()} if way else dict(found.CHECKS)


def outcome(check: Callable[[], Any]) -> dict[str, Any]:
    """Of a check, and of all that it has left to do on the GPU."""
    start, said, result = time.monotonic(), io.StringIO(), {"result": "ok"}
    try:
        with redirect_stdout(said):
            measured = check()
            if "cupy" in sys.modules:
                sys.modules["cupy"].cuda.Device().synchronize()
        if isinstance(measured, dict):
            result["measured"] = measured
    except Exception:  # the edge of one check
        result = {"result": "FAILED", "reason": traceback.format_exc()}
    return {**result, "seconds": round(time.monotonic() - start, 3), "said": said.getvalue()}


def main(fd: str, module: str, way: str, *done: str) -> int:
    logging.disable()  # copies that are made to fail say so
    with os.fdopen(int(fd), "w") as lines:

        def say(**what: Any) -> None:
            lines.write(json.dumps(what) + "\n")
            lines.flush()

        return run(say, module, way, done)


def run(say: Callable[..., None], module: str, way: str, done: Sequence[str]) -> int:
    try:
        checks = {name: check for name, check in checks_of(module, way).items() if name not in done}
    except ImportError as error:
        say(left_out=str(error))
        return 0
    say(checks=list(checks))
    for name, check in checks.items():
        say(begins=name)
        found = outcome(check)
        say(**found)
        if found["result"] == "FAILED":
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
