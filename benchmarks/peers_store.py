"""The `file` store beside LMCache's stores of files, from its released wheel, on a CPU: rates of puts and gets, and the
time to a first hit. Each has a process and an environment of its own; they take turns with equal batches of values.

`fs_native` and `fs` are LMCache's L2 adapters, `local_disk` is its LocalDiskBackend, all at their defaults. What they
do: no fsync in any store, ours included. A checksum in ours alone, which is also played without. A rename of the
finished file in ours and in L2 adapters; LocalDiskBackend writes in place, and a new process of it finds nothing. A
limit of the directory's size in ours and LocalDiskBackend. Threads: one in `fs` and in puts of ours, else four.

The time to create an empty file where a store creates its own shows how much of `put` other programs have caused: ext4
without a journal avoids inodes of deleted files for minutes, and examines them at each new file, in some folders more
than in others.

Every batch is checked: a store that returns other bytes than it was given has a mark in the table. A new directory in
DIRECTORY (default: `build/`) holds at most half a GiB and is deleted at the end. A contender that this machine lacks is
a row that says why; `--only ours` needs no other environment.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from _support import ROOT, begin, median, sized

sys.path.insert(0, str(ROOT / "benchmarks" / "peers"))
from driver import Entry, Process, say_needs, turns

PLAYER = ROOT / "benchmarks" / "peers_store" / "files_player.py"
ENTRIES = (
    Entry("ours", "dev", "our_files", "checksums"),
    Entry("ours, no checksums", "dev", "our_files", "bare"),
    Entry("LMCache, fs_native", "lmcache", "lmcache_files", "fs_native"),
    Entry("LMCache, fs", "lmcache", "lmcache_files", "fs"),
    Entry("LMCache, local_disk", "lmcache", "lmcache_files", "local_disk"),
)
VALUE_BYTES = sized((64 << 10, 1 << 20), (64 << 10,))
VALUES = sized(32, 4)
"""That are moved at once."""

TURNS = sized(15, 1)
FILLED_TURNS, FILLED_BYTES = sized(32, 2), 64 << 10
STARTS = sized(3, 1)
VERBS = ("create", "lookup", "put", "get", "cold")


class Store(Process):
    """A contender's process and its directory."""

    took: list[dict[str, list[float]]]
    """Of each turn after the first: seconds and CPU seconds by verb."""

    def open(self, directory: Path, value_bytes: int) -> None:
        """In the same process, if it lives. A store that had died has another life."""
        self.took = []
        if self._command:
            self.why = self.lie = ""
            if self._process is None:
                self._start()
            own = directory / self.entry.kind
            if answer := self._ask(
                {"make": {"directory": str(own), "value_bytes": value_bytes, "values": VALUES}}, "not here"
            ):
                self.version = answer["version"]

    def ask(self, order: str, given: int) -> Any:
        """The answer, or None from a store that has none."""
        answer = None if self.why else self._ask({order: given}, "died")
        self.lie = self.lie or (answer or {}).get("lie", "")
        return answer

    def _start(self) -> None:
        self._command[-1] = str(PLAYER)
        super()._start()


def main() -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("directory", type=Path, nargs="?", default=ROOT / "build", metavar="DIRECTORY")
        parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders whose names begin so")

    run = begin(configure=configure)
    run.options.directory.mkdir(exist_ok=True)
    entries = [entry for entry in ENTRIES if entry.name.startswith(tuple(run.options.only or ("",)))]
    say_needs(entries, download_gib=3, room_gib=5, minutes=sized(4, 1))
    stores = {entry.name: Store(entry) for entry in entries}
    with tempfile.TemporaryDirectory(prefix="peers-store-", dir=run.options.directory) as name:
        cases = {size: play(stores, Path(name) / str(size), size) for size in VALUE_BYTES}
        run.save({
            "values": VALUES, "turns": TURNS, "cases": cases, "filled": FILLED_TURNS * VALUES, "starts": STARTS,
            "first_hits": first_hits(stores, Path(name) / "filled"),
        })  # fmt: skip


def play(stores: dict[str, Store], directory: Path, value_bytes: int) -> dict[str, dict[str, Any]]:
    directory.mkdir()
    for store in stores.values():
        store.open(directory, value_bytes)
    for name, turn, _ in turns(list(stores), TURNS + 1, 1):
        answer = stores[name].ask("turn", turn)
        if answer and turn:  # the first one warms up
            stores[name].took.append(answer["took"])
    return {name: row(store, VALUES * value_bytes) for name, store in stores.items()}


def row(store: Store, num_bytes: int) -> dict[str, Any]:
    """Medians of the turns. `cold` counts those in which every page had left the page cache, and may lack."""
    if store.why:
        return {"why": store.why}
    medians = {}
    for verb in VERBS:
        if found := [turn[verb] for turn in store.took if verb in turn]:
            medians[verb] = [median(each) for each in zip(*found, strict=True)]
    return {
        "version": store.version, "lie": store.lie, "create_file_us": 1e6 * medians.pop("create")[0],
        "lookup_us": 1e6 * medians.pop("lookup")[0],
        "gb_per_s": {verb: num_bytes / seconds / 1e9 for verb, (seconds, _) in medians.items()},
        "cpu_s_per_gb": {verb: 1e9 * cpu / num_bytes for verb, (_, cpu) in medians.items()},
    }  # fmt: skip


def first_hits(stores: dict[str, Store], directory: Path) -> dict[str, dict[str, Any]]:
    """Milliseconds from a new process that has imported everything to its first value, in a filled directory."""
    directory.mkdir()
    for store in stores.values():
        store.open(directory, FILLED_BYTES)
        store.ask("fill", FILLED_TURNS)
        store.close()
    hits: dict[str, list[dict[str, Any]]] = {name: [] for name in stores}
    for name, _, _ in turns(list(stores), STARTS, 1):
        store = stores[name]
        store.open(directory, FILLED_BYTES)
        if answer := store.ask("first", 0):
            hits[name].append(answer)
        store.close()
    return {name: first_hit(store, hits[name]) for name, store in stores.items()}


def first_hit(store: Store, answers: list[dict[str, Any]]) -> dict[str, Any]:
    if store.why:
        return {"why": store.why}
    seconds = [each["first_hit_s"] for each in answers]
    lies = (each["lie"] for each in answers)
    return {"lie": next(filter(None, lies), ""), "ms": None if None in seconds else 1e3 * median(seconds)}


if __name__ == "__main__":
    main()
