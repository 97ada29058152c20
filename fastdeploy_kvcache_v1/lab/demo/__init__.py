"""Shows the effect of the cache: one scene against five set-ups of a server. `fastdeploy-kvcache demo`."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from pathlib import Path

from ...errors import ConfigError

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="Hugging Face directory, smollm2 (default) or random")
    parser.add_argument("--page", type=Path, default=Path("kvcache-demo.html"), help="where to write it (%(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write README's picture of it, too, as SVG")
    parser.add_argument(
        "--fastdeploy", type=Path, metavar="DIR", help="play against FastDeploy over a CPU worker, from this checkout"
    )


def run(args: argparse.Namespace) -> int:
    """0 when all set-ups gave the same answers, 1 otherwise. Main thread only.

    Raises `ConfigError`, `ModelFetchError`, `WorkerDiedError`.
    """
    from .player import demo_server, show

    for path in filter(None, (args.page, args.picture)):
        _require_writable(path)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # ends what was started, as Ctrl-C does
    return show(demo_server(args.model, args.fastdeploy), args.page, args.picture)


def _require_writable(path: Path) -> None:
    """Check before two minutes are spent. Raises `ConfigError`."""
    target = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise ConfigError(f"cannot write {path}: choose a file in a directory that exists and is yours")
