"""The `demo` command: plays all set-ups, says what differed, and writes the page."""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path

from ..errors import ConfigError
from .scenario import longest, play
from .setups import setups


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", help="Hugging Face directory, smollm2 (default) or random")
    parser.add_argument("--page", type=Path, default=Path("kvcache-demo.html"), help="where to write it (%(default)s)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write the page's plots as SVG, too")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write what was measured as JSON, too")
    parser.add_argument(
        "--fastdeploy", type=Path, metavar="DIR", help="play against FastDeploy over a CPU worker, from this checkout"
    )


def run(args: argparse.Namespace) -> int:
    """0 when all set-ups gave the same answers, 1 otherwise. Raises `ConfigError`, `WorkerDiedError`."""
    from rich.console import Console

    from .live import Board
    from .page import page, picture
    from .server import DemoServer
    from .verdict import differences, verdicts

    for path in filter(None, (args.page, args.picture, args.results)):
        _require_writable(path)
    if args.fastdeploy is None:
        server = DemoServer.embedded(args.model)
    else:
        server = DemoServer.fastdeploy(args.fastdeploy, args.model)
    requests, console = play(), Console()
    compared = setups(server.num_tokens(longest(requests)), server.reserved_blocks)
    board = Board(requests, compared)
    with board.shown(console):
        results = {setup.name: server.play(setup, requests, board.add) for setup in compared}
    found = verdicts(results)
    args.page.write_text(page(results, requests, compared, found), encoding="utf-8")
    if args.picture:
        args.picture.write_text(picture(results), encoding="utf-8")
    if args.results:
        content = {name: [asdict(outcome) for outcome in outcomes] for name, outcomes in results.items()}
        args.results.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for line in (*found, f"The page with the plots: {args.page}"):
        console.print(line, highlight=False, soft_wrap=True)
    return 1 if differences(results) else 0


def _require_writable(path: Path) -> None:
    """Before two minutes are spent. Raises `ConfigError`."""
    target = path if path.exists() else path.absolute().parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise ConfigError(f"cannot write {path}: choose a file in a directory that exists and is yours")
