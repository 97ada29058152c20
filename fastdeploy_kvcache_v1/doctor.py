"""The `doctor` command: report what works here and what FastDeploy lacks to serve through this package."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import __version__, plugin
from .contract.installation import Finding, needed_by
from .errors import ConfigError, KVCacheError


class Check(NamedTuple):
    """`function(args)` yields findings. Its room is imported when it runs."""

    section: str
    name: str
    """Name of the finding if the check itself fails."""
    function: str
    """`module:function` of this package."""
    of_machine: bool = False
    """Left out with `--source`."""
    extras: str = ""
    """Extras that install its imports."""
    given: tuple[str, ...] = ()
    """Runs only if one of these arguments of the command was given."""


LAB, MACHINE, FASTDEPLOY = "Lab", "Machine", "FastDeploy"
STORAGE, ROLES = "Storage", "Prefill and decode servers"

CHECKS = (
    Check(LAB, "packages", "lab.checks:packages", of_machine=True),
    Check(LAB, "CPU worker", "lab.checks:cpu_worker"),
    Check(MACHINE, "system libraries", "worker.checks:system_libraries", of_machine=True),
    Check(MACHINE, "copy ops", "worker.checks:copy_ops", of_machine=True),
    Check(MACHINE, "memory", "worker.checks:memory", of_machine=True),
    Check(FASTDEPLOY, "FastDeploy", "fastdeploy_integration.checks:fastdeploy"),
    Check(FASTDEPLOY, "activation", "fastdeploy_integration.checks:activation", of_machine=True),
    Check(FASTDEPLOY, "PaddlePaddle", "fastdeploy_integration.checks:paddle", of_machine=True),
    Check(FASTDEPLOY, "GPU", "worker.checks:gpu", of_machine=True),
    Check(FASTDEPLOY, "CuPy", "worker.checks:cupy", of_machine=True),
    Check(FASTDEPLOY, "copy paths on the GPU", "worker.checks:copy_paths", of_machine=True),
    Check(FASTDEPLOY, "Paddle's copy operators", "worker.checks:paddle_operators", of_machine=True),
    Check(STORAGE, "storage", "storage.checks:clients", of_machine=True),
    Check(STORAGE, "storage", "storage.checks:stores"),
    Check(ROLES, "servers", "transfer.trial:servers", extras="embedded", given=("prefill", "decode")),
)
"""In the order of the report. A new check is a function of its room and a row; rooms may be missing from a wheel."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from .contract.flags import add_flags
    from .storage.registry import known_names, own_flags

    parser.epilog = (
        "Exit status: 0 if FastDeploy can serve through this package (with --source: if that tree can be patched), "
        "1 if something is to do, 2 for a wrong argument."
    )
    parser.add_argument(
        "--source", type=Path, metavar="DIR", help="check a FastDeploy source tree instead of what is installed here"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="OLD",
        help="with --source: show the differences of watched functions to those of OLD",
    )
    parser.add_argument(
        "--write-bodies", action="store_true", help="with --source: print patches/bodies-RELEASE.toml for that tree"
    )
    parser.add_argument(
        "--kvcache-storage-backend",
        choices=known_names(),
        metavar="NAME",
        help="also check this store and measure its speed, as each store whose flags are given",
    )
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            nargs="+",
            default=[],
            metavar="URL",
            help=f"also check these servers with --role {role} (FastDeploy: their log directory's kvcache_role.json)",
        )
    parser.add_argument("--peer-secret-file", type=Path, metavar="FILE", help="the secret of these servers")
    add_flags(parser, [flag for flags in own_flags().values() for flag in flags], with_defaults=True)


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. Raises `OverlayError` for a `--source` without FastDeploy or without a patch table."""
    if args.source is not None:
        with needed_by("the patch table"):
            from .fastdeploy_integration import checks
            from .fastdeploy_integration.overlay.release import fastdeploy_at
        fastdeploy_at(args.source)
    if args.against is not None or args.write_bodies:
        if args.source is None:
            raise ConfigError("--against and --write-bodies need a tree: name it with --source DIR")
        checks.print_bodies(args.source, args.against)
        return 0
    plugin.stand_by()
    print(f"fastdeploy-kvcache-v1 {__version__}, Python {sys.version.split()[0]}")
    found: dict[str, list[Finding]] = {check.section: [] for check in CHECKS}
    for check in CHECKS:
        found[check.section] += findings(check, args)
    verdicts = [_shown(section, each) for section, each in found.items() if each]
    print(f"\n{'; '.join(verdicts)}")
    return int(any(finding.ok is False for each in found.values() for finding in each))


def findings(check: Check, args: argparse.Namespace) -> Iterator[Finding]:
    """Findings of a check, or one about its failure."""
    if (check.of_machine and args.source is not None) or (check.given and not any(map(vars(args).get, check.given))):
        return
    module, _, function = check.function.partition(":")
    if importlib.util.find_spec(f"{__package__}.{module.partition('.')[0]}") is None:
        return
    try:
        with needed_by("this check", check.extras):
            yield from getattr(importlib.import_module(f".{module}", __package__), function)(args)
    except (OSError, ImportError, KVCacheError) as error:
        yield Finding(False, check.name, " ".join(str(error).split()) or type(error).__name__)


def _shown(section: str, findings: list[Finding]) -> str:
    """Print a section, failures first. Returns its verdict."""
    num_failed = sum(finding.ok is False for finding in findings)
    verdict = f"{num_failed} to do" if num_failed else "ok"
    if section == FASTDEPLOY and not num_failed and all(finding.name != "patch table" for finding in findings):
        verdict = "nothing to patch"  # it has a manager of its own
    elif all(finding.ok is None for finding in findings):
        verdict = "nothing tried"
    print(f"\n{section}: {verdict}", *sorted(findings, key=lambda each: each.ok is not False), sep="\n")
    return f"{section}: {verdict}"
