"""What `doctor` asks about stores: are their clients installed, and do the stores that are named work?"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator

from ..config import MIB
from ..contract.installation import Finding, missing_libraries, needed_by
from ..errors import KVCacheError
from .registry import known_names, store_kind
from .settings import StorageSettings


def clients(args: argparse.Namespace) -> Iterator[Finding]:
    for name in known_names():
        kind = store_kind(name)
        if kind.module is not None:
            found = importlib.util.find_spec(kind.module) is not None
            yield Finding(None, f"storage {name}", f"{kind.module} {'importable' if found else 'not installed'}")
        if lost := missing_libraries(kind.libraries):
            yield Finding(None, "system libraries", f"{name} loads {lost}")


def stores(args: argparse.Namespace) -> Iterator[Finding]:
    """Those that are named: a directory, or what servers share."""
    backend, directory = args.kvcache_storage_backend, args.kvcache_storage_dir
    kinds = [store_kind(name) for name in known_names()]
    for kind in kinds:
        if kind.has_directory and directory is not None:
            yield _tried(f"storage {kind.name} {directory}", StorageSettings(kind.name, directory))
        elif kind.has_directory and backend == kind.name:
            error = "got no directory, expected one: give --kvcache-storage-dir DIR"
            yield Finding(False, f"storage {kind.name}", error)
        elif kind.name == backend:
            given = {flag: getattr(args, flag.name) for flag in kind.flags}
            options = {flag.name: None if value is None else flag.checked(value) for flag, value in given.items()}
            yield _tried(f"storage {backend}", StorageSettings(backend, options=options))


def _tried(name: str, settings: StorageSettings) -> Finding:
    from .base import StorageFullError

    try:
        with needed_by("this check", "embedded"):
            from . import round_trip

            settings.kind.check(settings, None)
            took = round_trip.try_store(settings.kind, settings)
    except StorageFullError:
        return Finding(None, name, "got an answer, but no room for a trial: start a server that gives memory")
    except (OSError, ImportError, KVCacheError) as error:
        return Finding(False, name, " ".join(str(error).split()) or type(error).__name__)
    put, get = (f"{took.num_bytes / 1e6 / seconds:,.0f} MB/s" for seconds in (took.put_s, took.get_s))
    return Finding(True, name, f"{took.num_bytes // MIB} MiB stored at {put} and read at {get}{settings.kind.measures}")
