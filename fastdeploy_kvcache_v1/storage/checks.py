"""What `doctor` asks about stores: are their clients installed, and do the stores that are named work?"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from ..config import MIB
from ..contract.installation import Finding, missing_libraries, needed_by
from ..errors import KVCacheError

CLIENTS = {"mooncake": "mooncake", "attention_store": "attentionstore_sdk"}
"""The Python module of a backend that needs one."""

TRIALS = {
    "file": (".round_trip", "try_directory", ", through the page cache"),
    "mooncake": (".round_trip", "try_mooncake", ""),
    "attention_store": (".attention_store.trial", "try_attention_store", ", from and to memory of the lab's server"),
}
"""By backend: module and function, and what to say of the rates."""

MOONCAKE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
    "librdmacm.so.1": "librdmacm1",
    "liburing.so.2": "liburing2",
}
"""Of the system, with Debian's names of their packages."""


def clients(args: argparse.Namespace) -> Iterator[Finding]:
    for backend, module in CLIENTS.items():
        found = importlib.util.find_spec(module) is not None
        yield Finding(None, f"storage {backend}", f"{module} {'importable' if found else 'not installed'}")
    if lost := missing_libraries(MOONCAKE_LIBRARIES):
        yield Finding(None, "system libraries", f"Mooncake loads {lost}")


def stores(args: argparse.Namespace) -> Iterator[Finding]:
    """Those that are named: a directory, or what servers share."""
    backend, directory = args.kvcache_storage_backend, args.kvcache_storage_dir
    if directory is not None:
        yield _tried(f"storage file {directory}", *TRIALS["file"], directory)
    elif backend == "file":
        yield Finding(False, "storage file", "got no directory, expected one: give --kvcache-storage-dir DIR")
    if backend not in (None, "file"):
        yield _tried(f"storage {backend}", *TRIALS[backend])


def _tried(name: str, module: str, function: str, how: str, *given: Path) -> Finding:
    from .base import StorageFullError

    try:
        with needed_by("this check", "embedded"):
            trial = importlib.import_module(module, __package__)
            took = getattr(trial, function)(*given)
    except StorageFullError:
        return Finding(None, name, "got an answer, but no room for a trial: start a server that gives memory")
    except (OSError, ImportError, KVCacheError) as error:
        return Finding(False, name, " ".join(str(error).split()) or type(error).__name__)
    put, get = (f"{trial.NUM_BYTES / 1e6 / seconds:,.0f} MB/s" for seconds in (took.put_s, took.get_s))
    return Finding(True, name, f"{trial.NUM_BYTES // MIB} MiB stored at {put} and read at {get}{how}")
