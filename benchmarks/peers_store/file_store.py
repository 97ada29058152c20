"""What an adapter of a store of files provides. `files_player.py` times `put`, `lookup` and `get` alone."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any


class FileStore(ABC):
    """A store in `directory`, which it makes. `kind` chooses one of the adapter's stores."""

    version: str

    pattern: str
    """Of the files that hold values, below the directory."""

    folder = ""
    """Below the directory, where files are created."""

    extra_bytes = 0
    """Behind each value, in the buffers that `put` and `get` are given."""

    @abstractmethod
    def __init__(self, directory: Path, kind: str) -> None: ...

    @abstractmethod
    def keys(self, hashes: Sequence[bytes]) -> Any:
        """The store's keys of values with these names of 32 bytes."""

    def held(self, buffers: Sequence[memoryview]) -> Any:
        """The buffers as the store takes them."""
        return buffers

    @abstractmethod
    def put(self, keys: Any, held: Any) -> None:
        """Returns when all values can be found."""

    @abstractmethod
    def lookup(self, keys: Any) -> int:
        """How many are stored."""

    @abstractmethod
    def get(self, keys: Any, held: Any) -> int:
        """Fill the buffers. Returns how many values came."""

    @abstractmethod
    def close(self) -> None: ...
