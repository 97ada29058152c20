"""`fastdeploy-kvcache serve | router | demo | replay | traffic | storage | explain | doctor`.

Only the module of the chosen command is imported.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple

from . import __version__
from .contract.installation import needed_by
from .errors import ConfigError, KVCacheError

PROGRAM = "fastdeploy-kvcache"
EXIT_ERROR = 2


class Command(NamedTuple):
    """`module` has `add_arguments(parser)` and `run(args)`, or `run(args, unknown)` if it passes flags on."""

    name: str
    module: str
    help: str
    extras: str = ""
    """Extras that install its imports, separated by commas. `--help` works without them."""
    passes_flags_on: bool = False


COMMANDS = (
    Command("serve", ".lab.server.command", "start the OpenAI-compatible server", "embedded", passes_flags_on=True),
    Command("router", ".lab.router", "send requests to prefill and decode servers", "embedded"),
    Command("demo", ".lab.demo", "show the effect of the cache, in two minutes", "embedded,demo"),
    Command("replay", ".lab.replay", "run a request trace through the cache manager alone"),
    Command("traffic", ".lab.traffic", "generate a request trace for replay: chat, agents, batch jobs and others"),
    Command("storage", ".storage.file.command", "inspect and clean a directory of stored blocks", "embedded"),
    Command("explain", ".explain.command", "say why requests missed the cache of a server, and what to change"),
    Command("doctor", ".doctor", "check FastDeploy, its patch points and this machine"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit status: 2 for a wrong setting or a missing extra, with an error of one line."""
    words = list(sys.argv[1:] if argv is None else argv)
    command = next((each for each in COMMANDS if words[:1] == [each.name]), None)
    if command is None:
        _overview().parse_args(words)
        return EXIT_ERROR  # not reached: parse_args ends the process
    try:
        with needed_by(command.name, command.extras):
            status = _run(command, words[1:])
            sys.stdout.flush()
            return status
    except BrokenPipeError:
        if command.extras:  # it has other pipes than its output
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # its reader, such as `head`, has ended
        return 141  # as a program that SIGPIPE ended: the status of a report that was cut off is unknown
    except KVCacheError as error:
        print(f"{PROGRAM}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return EXIT_ERROR
    except KeyboardInterrupt:
        return 130


def _run(command: Command, words: Sequence[str]) -> int:
    if command.module.startswith(".lab.") and importlib.util.find_spec(".lab", __package__) is None:
        todo = "pip install --force-reinstall fastdeploy-kvcache-v1"
        raise ConfigError(f"{command.name} needs the lab, which is not installed: {todo}")
    module = importlib.import_module(command.module, __package__)
    parser = argparse.ArgumentParser(prog=f"{PROGRAM} {command.name}", description=command.help, allow_abbrev=False)
    module.add_arguments(parser)
    if command.passes_flags_on:
        status: int = module.run(*parser.parse_known_args(words))
    else:
        status = module.run(parser.parse_args(words))
    return status


def _overview() -> argparse.ArgumentParser:
    """Make a parser that knows only the names of commands, for `--help` and for mistakes."""
    parser = argparse.ArgumentParser(prog=PROGRAM, description="The v1 KV-cache manager for FastDeploy.")
    parser.add_argument("--version", action="version", version=f"{PROGRAM} {__version__}")
    choices = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in COMMANDS:
        choices.add_parser(command.name, help=command.help)
    return parser


if __name__ == "__main__":
    sys.exit(main())
