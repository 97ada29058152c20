"""What `doctor` asks about stores: are their clients installed, and do the stores that are named work?"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Iterator

from ..config import MIB
from ..contract.installation import Finding, missing_libraries, needed_by
from ..errors import KVCacheError
from .registry import StoreKind, known_names, store_kind
from .settings import StorageSettings, flags_of_others


def clients(args: argparse.Namespace) -> Iterator[Finding]:
    for name in known_names():
        kind = store_kind(name)
        if kind.module is not None:
            found = importlib.util.find_spec(kind.module) is not None
            yield Finding(None, f"storage {name}", f"{kind.module} {'importable' if found else 'not installed'}")
        if lost := missing_libraries(kind.libraries):
            yield Finding(None, "system libraries", f"{name} loads {lost}")


def stores(args: argparse.Namespace) -> Iterator[Finding]:
    """Those that are named, and those whose flags are given."""
    named = {args.kvcache_storage_backend, *(name for _, name in flags_of_others(args))}
    for kind in map(store_kind, known_names()):
        if kind.name in named:
            yield _tried(kind, args)


def _tried(kind: StoreKind, args: argparse.Namespace) -> Finding:
    from .base import StorageFullError

    name = f"storage {kind.name}"
    try:
        settings = StorageSettings(kind.name, kind.options_of(args))
        name = " ".join([name, *(str(settings.options[flag.name]) for flag in kind.flags if flag.is_required)])
        with needed_by("this check", "embedded"):
            from . import round_trip

            kind.check(settings, None)
            took = round_trip.try_store(kind, settings)
    except StorageFullError:
        return Finding(None, name, "got an answer, but no room for a trial: start a server that gives memory")
    except (OSError, ImportError, KVCacheError) as error:
        return Finding(False, name, " ".join(str(error).split()) or type(error).__name__)
    put, get = (f"{took.num_bytes / 1e6 / seconds:,.0f} MB/s" for seconds in (took.put_s, took.get_s))
    return Finding(True, name, f"{took.num_bytes // MIB} MiB stored at {put} and read at {get}{kind.measures}")
