"""The `file` store, for the registry."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..namespace import Namespace
from ..registry import Chosen, RoundTrip, StoreKind

if TYPE_CHECKING:
    from .file_backend import FileBackend


def _open(settings: Chosen, namespace: Namespace) -> FileBackend:
    from .file_backend import FileBackend

    assert settings.directory is not None
    return FileBackend(
        settings.directory,
        namespace,
        capacity_bytes=settings.capacity_bytes,
        write_bytes_per_day=settings.write_bytes_per_day,
    )


def _check(settings: Chosen, namespace: Namespace | None) -> None:
    from .directory import check_directory

    assert settings.directory is not None
    check_directory(settings.directory)


def _trial(settings: Chosen) -> RoundTrip:
    from ..round_trip import try_directory

    assert settings.directory is not None
    return try_directory(settings.directory)


STORE = StoreKind(
    "file", open=_open, check=_check, trial=_trial, measures=", through the page cache", has_directory=True
)
