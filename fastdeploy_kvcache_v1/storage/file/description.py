"""The `file` store, for the registry."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ...config import GIB
from ..namespace import Namespace
from ..registry import Chosen, RoundTrip, StoreKind, store_flag

if TYPE_CHECKING:
    from .file_backend import FileBackend

DIRECTORY = store_flag(
    "kvcache_storage_dir",
    "directory of the file backend, created if missing",
    unit="DIR",
    variable="FILE_BACKEND_STORAGE_DIR",  # FastDeploy's, for its file store
)
_gib = partial(store_flag, type=float, unit="GIB", above=0)
SIZE = _gib("kvcache_storage_gib", "largest size of that directory in GiB", default=10.0)
WRITTEN = _gib(
    "kvcache_storage_write_gib_per_day", "most GiB that its servers write into it a day", otherwise="no limit"
)


def _open(settings: Chosen, namespace: Namespace) -> FileBackend:
    from .file_backend import FileBackend

    written_gib = settings.options[WRITTEN.name]
    return FileBackend(
        Path(settings.options[DIRECTORY.name]),
        namespace,
        capacity_bytes=int(settings.options[SIZE.name] * GIB),
        write_bytes_per_day=None if written_gib is None else int(written_gib * GIB),
    )


def _check(settings: Chosen, namespace: Namespace | None) -> None:
    from .directory import check_directory

    check_directory(Path(settings.options[DIRECTORY.name]))


def _trial(settings: Chosen) -> RoundTrip:
    from ..round_trip import try_directory

    return try_directory(Path(settings.options[DIRECTORY.name]))


STORE = StoreKind(
    "file",
    open=_open,
    check=_check,
    trial=_trial,
    measures=", through the page cache",
    flags=[DIRECTORY, SIZE, WRITTEN],
)
