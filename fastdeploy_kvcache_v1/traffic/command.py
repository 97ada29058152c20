"""The `traffic` command: writes a generated trace."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from itertools import islice

from ..errors import ConfigError
from .kinds import KINDS
from .source import Source

EPILOG = """kinds:
  scan      every prompt is new
  loop      ITEMS documents of TOKENS in turn, again and again
  hot       one system prompt of TOKENS, short questions
  chat      conversations with a first message of TOKENS, behind one of ITEMS system prompts
  agents    sessions of calls that share one of ITEMS long instructions of TOKENS
  shifting  ITEMS documents of TOKENS, a few of them popular, others every five minutes
  batch     half chat, half jobs: new documents of TOKENS behind one of ITEMS instructions
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("kind", choices=tuple(KINDS), metavar="KIND", help="see below")
    parser.add_argument("--requests", type=int, default=10_000, metavar="N", help="lines to write (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="equal seeds make equal traces (%(default)s)")
    parser.add_argument("--rate", type=float, metavar="R", help="requests per second on average (the kind's)")
    parser.add_argument("--tokens", type=int, help="see below (the kind's)")
    parser.add_argument("--items", type=int, help="see below (the kind's)")


def run(args: argparse.Namespace) -> int:
    """Write the trace to standard output. Raises `ConfigError` for a value that cannot work."""
    given = {name: value for name in ("rate", "tokens", "items") if (value := getattr(args, name)) is not None}
    for name, value in {"requests": args.requests, **given}.items():
        if not (0 < value < float("inf") if name == "rate" else value >= 1):
            least = "more than 0" if name == "rate" else "at least 1"
            raise ConfigError(f"--{name} must be {least}, got {value}")
    kind = KINDS[args.kind]
    lines = kind.lines(Source(args.seed), replace(kind.shape, **given))
    try:
        for line in islice(lines, args.requests):
            print(json.dumps(line, separators=(",", ":")))
        sys.stdout.flush()
    except BrokenPipeError:  # whoever reads has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
