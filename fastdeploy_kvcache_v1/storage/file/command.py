"""The `storage` command: looks after the directory of the `file` store, also while servers use it."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from ...config import GIB
from ...errors import ConfigError, StorageError
from ..namespace import FORMAT_VERSION
from .directory import FORMAT, SIZES, has_format, remove_abandoned
from .inventory import amount, inventory
from .shard_sizes import ShardSizes
from .value_files import StoredFile, delete_files, list_shard, namespaces, remove_if_empty, shards, stored_files

DAY_NS = 24 * 60 * 60 * 10**9
SHOWN_DAMAGED = 10
"""Paths in the text; the JSON has them all."""


class Outcome(NamedTuple):
    """What an action prints, in either form, and its exit status."""

    result: dict[str, Any]
    text: str
    status: int = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    _action(actions, "info", _info, "show what is stored")
    verify = _action(actions, "verify", _verify, "read every value and verify its checksum")
    verify.add_argument("--repair", action="store_true", help="delete damaged values, whose blocks are then recomputed")
    verify.epilog = "Exit status: 0 if no value is damaged, 1 if some are, 2 for a wrong directory."
    prune = _action(actions, "prune", _prune, "delete old values and empty namespaces")
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="delete values unused for this time")
    prune.add_argument("--to-gib", type=float, metavar="GIB", help="delete the oldest values above this size")
    clear = _action(actions, "clear", _clear, "delete all values; servers that use the directory go on")
    clear.add_argument("--namespace", metavar="DIGEST", help="only the values of this namespace (see info)")


def _action(
    actions: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    act: Callable[[argparse.Namespace], Outcome],
    description: str,
) -> argparse.ArgumentParser:
    parser = actions.add_parser(name, help=description, description=description, allow_abbrev=False)
    parser.add_argument(
        "--kvcache-storage-dir", type=Path, required=True, metavar="DIR", help="directory of the file storage"
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(act=act)
    return parser


def run(args: argparse.Namespace) -> int:
    """Returns the exit status. Raises `ConfigError` for a directory that is not a storage directory of this version,
    `StorageError` when the disk fails.
    """
    directory: Path = args.kvcache_storage_dir
    if not has_format(directory):
        raise ConfigError(f"{directory} is not a storage directory (no file {directory / FORMAT}): give a server's")
    try:
        outcome: Outcome = args.act(args)
    except OSError as error:
        raise StorageError(f"{error.filename or directory}: {error.strerror}") from error
    print(json.dumps(outcome.result, indent=2) if args.json else outcome.text)
    return outcome.status


def _info(args: argparse.Namespace) -> Outcome:
    directory: Path = args.kvcache_storage_dir
    found = inventory(directory)
    num_values, num_bytes = sum(each.num_values for each in found), sum(each.num_bytes for each in found)
    result = {
        "directory": str(directory),
        "format_version": FORMAT_VERSION,
        "namespaces": [each.as_json() for each in found],
        "values": num_values,
        "bytes": num_bytes,
    }
    total = f"{directory}: format version {FORMAT_VERSION}, {amount(num_values, num_bytes)}"
    return Outcome(result, "\n".join([total, *map(str, found)]))


def _verify(args: argparse.Namespace) -> Outcome:
    from .verification import verified

    directory: Path = args.kvcache_storage_dir
    files = list(stored_files(directory))
    found = verified(_with_progress(files))
    names = sorted(str(Path(file.path).relative_to(directory)) for file in found.damaged)
    if args.repair:
        with contextlib.closing(ShardSizes(directory / SIZES)) as sizes:
            delete_files(found.damaged, sizes)
            for shard in {file.shard for file in found.damaged}:
                list_shard(directory, shard, sizes)  # sizes of damaged values are wrong
    result = {
        "values": found.num_values,
        "bytes": found.num_bytes,
        "vanished_values": found.num_vanished,
        "damaged_values": len(names),
        "deleted_values": len(names) if args.repair else 0,
        "damaged": names,
    }
    end = "none damaged" if not names else f"{len(names)} damaged" + (", deleted" if args.repair else "")
    lines = [f"checked {amount(found.num_values, found.num_bytes)}: {end}", *names[:SHOWN_DAMAGED]]
    if len(names) > SHOWN_DAMAGED:
        lines.append(f"and {len(names) - SHOWN_DAMAGED} more: --json lists all")
    if names and not args.repair:
        lines.append("servers ignore them; --repair deletes them")
    return Outcome(result, "\n".join(lines), 1 if names else 0)


def _with_progress(files: list[StoredFile]) -> Iterator[StoredFile]:
    total = sum(file.num_bytes for file in files)
    with tqdm(total=total, unit="B", unit_scale=True, desc="verify", disable=None, leave=False) as bar:
        for file in files:
            yield file
            bar.update(file.num_bytes)


def _prune(args: argparse.Namespace) -> Outcome:
    days, gib = args.older_than, args.to_gib
    if days is None and gib is None:
        raise ConfigError("prune needs a limit: give --older-than DAYS, --to-gib GIB, or both")
    for flag, value in (("--older-than", days), ("--to-gib", gib)):
        if value is not None and not 0 <= value < math.inf:
            raise ConfigError(f"{flag} must be a number from 0 on, got {value:g}")
    oldest_ns = -math.inf if days is None else time.time_ns() - days * DAY_NS
    most_bytes = math.inf if gib is None else gib * GIB
    return _deletion(args, lambda file, stored: file.used_ns < oldest_ns or stored > most_bytes)


def _clear(args: argparse.Namespace) -> Outcome:
    directory, chosen = args.kvcache_storage_dir, args.namespace
    if chosen is not None and chosen not in {path.name for path in namespaces(directory)}:
        raise ConfigError(f"{directory} has no namespace {chosen!r}: `storage info` lists its namespaces")
    return _deletion(args, lambda file, _: chosen in (None, file.namespace), only=chosen)


def _deletion(
    args: argparse.Namespace, is_unwanted: Callable[[StoredFile, int], bool], only: str | None = None
) -> Outcome:
    """`is_unwanted` is asked about each value, least recently used first, with the bytes that are still stored.

    Empty namespaces go too, of which `only` names the one that may.
    """
    directory: Path = args.kvcache_storage_dir
    with contextlib.closing(ShardSizes(directory / SIZES)) as sizes:
        files = sorted(file for shard in shards(directory, sizes) for file in list_shard(directory, shard, sizes))
        num_bytes = left = sum(file.num_bytes for file in files)
        unwanted = []
        for file in files:
            if is_unwanted(file, left):
                unwanted.append(file)
                left -= file.num_bytes
        delete_files(unwanted, sizes)
        with sizes.exclusive():
            gone = [path.name for path in namespaces(directory) if only in (None, path.name) and remove_if_empty(path)]
    remove_abandoned(directory)
    num_left = len(files) - len(unwanted)
    text = (
        f"deleted {amount(len(unwanted), num_bytes - left)}, and {len(gone)} empty namespaces\n"
        f"{amount(num_left, left)} are left"
    )
    result = {
        "deleted_values": len(unwanted),
        "deleted_bytes": num_bytes - left,
        "values": num_left,
        "bytes": left,
        "deleted_namespaces": gone,
    }
    return Outcome(result, text)
