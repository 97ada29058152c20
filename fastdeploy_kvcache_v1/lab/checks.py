"""Checks of `doctor` about the lab: packages of its commands, and the patch table of its CPU worker."""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Iterator

from ..contract.installation import MODULES, Finding
from ..errors import OverlayError

COMMANDS = {"": "replay and traffic", "embedded": "serve and router", "demo": "demo"}
"""Commands of the lab by the extra that they need."""


def packages(args: argparse.Namespace) -> Iterator[Finding]:
    """Only a package that all commands need is a failure: `replay` needs no server."""
    for extra, commands in COMMANDS.items():
        names = [name for name in MODULES[extra] if name != "tomli" or sys.version_info < (3, 11)]
        lacking = [name for name in names if importlib.util.find_spec(name) is None]
        todo = "pip install " + (f"'fastdeploy-kvcache-v1[{extra}]'" if extra else "fastdeploy-kvcache-v1")
        detail = f"got no {', '.join(lacking)}, expected them: {todo}" if lacking else "all packages are installed"
        yield Finding((None if extra else False) if lacking else True, commands, detail)


def cpu_worker(args: argparse.Namespace) -> Iterator[Finding]:
    """Patch points of `serve --fastdeploy-cpu`. They are failures with `--source` only: a GPU server needs none."""
    from ..fastdeploy_integration.checks import table_findings
    from ..fastdeploy_integration.overlay import release
    from ..fastdeploy_integration.overlay.overlay import Overlay
    from .fastdeploy_cpu import activation

    found: list[Finding] = []
    try:
        tree = release.installed_fastdeploy() if args.source is None else release.fastdeploy_at(args.source)
        if tree is not None and not tree.has_own_manager:
            found += table_findings("CPU worker table", Overlay(activation.table_for(tree.release), tree.root))
    except OverlayError as error:
        found.append(Finding(False, "CPU worker table", str(error)))
    yield from found if args.source is not None else (each if each.ok else each._replace(ok=None) for each in found)
