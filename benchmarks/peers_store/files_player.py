"""One store of files in a process of its own, which does what the driver asks and answers with times.

    files_player.py ADAPTER KIND

ADAPTER is a module whose `CONTENDER` makes a `file_store.FileStore`. Orders come as lines of JSON on standard input,
and each is answered by a line on the first standard output. What an engine prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import json
import mmap
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from file_store import FileStore

LONG_AGO_S = 3600
CREATED = 8


class Player:
    """Plays turns with a store in `directory`. The turn's number makes the names of its `values`, and their bytes."""

    def __init__(self, make: Callable[[], FileStore], directory: str, value_bytes: int, values: int) -> None:
        self.directory, self.value_bytes = Path(directory), value_bytes
        self.store, self.open_s, _ = timed(make)
        self.sources, self.targets = (
            [new_buffer(value_bytes + self.store.extra_bytes) for _ in range(values)] for _ in range(2)
        )
        self.put_from, self.get_into = map(self.store.held, (self.sources, self.targets))

    def fill(self, turns: int) -> None:
        for number in range(turns):
            self._write(number)
            self.store.put(self._keys(number), self.put_from)

    def first(self, number: int) -> dict[str, Any]:
        """Seconds until the first value of a turn is there, from before the store was made, or None for a miss."""
        self._write(number)
        start = perf_counter()
        keys, into = self._keys(number)[:1], self.get_into[:1]
        hits = self.store.lookup(keys) and self.store.get(keys, into)
        seconds = self.open_s + perf_counter() - start
        return {"first_hit_s": seconds if hits else None, "lie": self._lie(1, hits) if hits else ""}

    def turn(self, number: int) -> dict[str, Any]:
        """Seconds and CPU seconds of each verb. `cold` is a `get` of files that the page cache lacks, left out where it
        keeps some; `create` makes an empty file.
        """
        self._write(number)
        keys, took, lies = self._keys(number), {}, []
        empty = [self.directory / self.store.folder / f"{number}.{each}" for each in range(CREATED)]
        took["create"] = [each / CREATED for each in timed(create, empty)[1:]]
        took["put"] = timed(self.store.put, keys, self.put_from)[1:]
        files = [path for path in self.directory.glob(self.store.pattern) if path.stat().st_size]
        found, *took["lookup"] = timed(self.store.lookup, keys)
        for verb in ("get", "cold"):
            for path in files:  # a `get` may mark values as used, which soon after `put` it need not
                os.utime(path, (time.time() - LONG_AGO_S,) * 2)
            if verb == "get" or all(map(drop_from_cache, files)):
                came, *took[verb] = timed(self.store.get, keys, self.get_into)
                lies.append(self._lie(len(keys), came))
        for path in files:  # not deleted: ext4 without a journal avoids inodes of deleted files for minutes
            os.truncate(path, 0)
        if (found, len(files)) != (len(keys), len(keys)):
            lies.append(f"{found} of {len(keys)} values were found, in {len(files)} files")
        return {"took": took, "lie": next(filter(None, lies), "")}

    def _keys(self, number: int) -> Any:
        """Names of every turn begin alike: a store that makes a folder per beginning has made it in the first turn."""
        half = [hashlib.sha256(str(each).encode()).digest()[:16] for each in (number, *range(len(self.sources)))]
        return self.store.keys([each + half[0] for each in half[1:]])

    def _write(self, number: int) -> None:
        """Make the turn's bytes, and clear what is read into."""
        noise = random.Random(number)
        for source, target in zip(self.sources, self.targets, strict=True):
            source[: self.value_bytes] = noise.randbytes(self.value_bytes)
            target[:] = bytes(len(target))

    def _lie(self, asked: int, came: int) -> str:
        """What is wrong with the values that came, empty for nothing. Clears what was read into."""
        lie, size = "", self.value_bytes
        for number, (source, target) in enumerate(zip(self.sources[:asked], self.targets, strict=False)):
            if bytes(source[:size]) != bytes(target[:size]):
                lie = lie or f"value {number} of {asked} came back changed"
            target[:] = bytes(len(target))
        return lie if came == asked else f"{came} of {asked} values came"


def new_buffer(size: int) -> memoryview:
    """Begins at a page, in memory that has been touched."""
    buffer = memoryview(mmap.mmap(-1, size))
    buffer[:] = bytes(size)
    return buffer


def create(paths: Sequence[Path]) -> None:
    for path in paths:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL))


def timed(verb: Callable[..., Any], *given: Any) -> tuple[Any, float, float]:
    """What it returns, seconds, and CPU seconds of all threads."""
    cpu, start = process_time(), perf_counter()
    returned = verb(*given)
    end = perf_counter()
    return returned, end - start, process_time() - cpu


def drop_from_cache(path: Path) -> bool:
    """False where a page of the file stays in the page cache."""
    size = path.stat().st_size
    with path.open("rb") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        with mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE) as pages:
            address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
            cached = (ctypes.c_ubyte * -(-size // mmap.PAGESIZE))()
            failed = ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(size), cached)
    return not failed and not any(each & 1 for each in cached)


def main() -> None:
    adapter, kind = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = importlib.import_module(adapter).CONTENDER
    player = None
    for line in sys.stdin:
        ((order, given),) = json.loads(line).items()
        if order == "make":
            if player is not None:
                player.store.close()
            player = Player(partial(engine, Path(given["directory"]), kind), **given)
            answer: Any = {"version": player.store.version}
        else:
            answer = getattr(player, order)(given)
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
