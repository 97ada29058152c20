"""Contenders as processes that take turns: in each round every one plays the same range of requests."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from environments import Missing, python_of

FOLDER = Path(__file__).resolve().parent


class Entry(NamedTuple):
    """A contender: its row's name, the environment and adapter, and the adapter's `kind`."""

    name: str
    environment: str
    adapter: str
    kind: str
    path: str = ""
    """Folder of the engine's source, or the variable that names it, where no wheel is installed."""


class Case(NamedTuple):
    prompts: Path
    requests: int
    device: int
    host: int = 0
    window: int = 1


class Gone(Exception):
    """A contender that cannot be started, or that ended before its time."""


class Process:
    """A contender's process. `why` says why it is gone, and is empty while it lives."""

    def __init__(self, entry: Entry, case: Case, block_size: int) -> None:
        self.entry, self.why, self.lie, self.version = entry, "", "", ""
        self.played: list[list[float]] = []
        self._errors = TemporaryFile()  # noqa: SIM115 (closed with this object)
        numbers = map(str, (case.device, case.host, block_size, case.window))
        try:
            source = source_of(entry)
            command = [str(python_of(entry.environment)), "-W", "ignore", str(FOLDER / "player.py")]
            self._process = subprocess.Popen(
                [*command, entry.adapter, entry.kind, str(case.prompts), *numbers],
                env={**os.environ, "PYTHONPATH": source}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._errors, text=True,
            )  # fmt: skip
            self.version = self._answer()["version"]
        except Missing as missing:
            self.why = f"not here: {missing}"
        except Gone as gone:
            self.why = f"not here: {gone}"

    def play(self, first: int, last: int) -> None:
        """Play requests `[first, last)`; a process that dies has a reason afterwards, and plays no more."""
        if self.why:
            return
        try:
            answer = self._ask(f"{first} {last}")
            self.played += answer["played"]
            self.lie = self.lie or answer["lie"]
        except Gone as gone:
            self.why = f"died after {len(self.played)} requests: {gone}"

    def memory(self) -> dict[str, float]:
        try:
            return {} if self.why else self._ask("memory")
        except Gone as gone:
            self.why = f"died: {gone}"
            return {}

    def close(self) -> None:
        if hasattr(self, "_process"):
            self._process.communicate()

    def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # `_answer` finds the reason
            print(line, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        if line := self._process.stdout.readline():
            return json.loads(line)
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        raise Gone(last[0][:200] if last else f"exit code {code}")


def source_of(entry: Entry) -> str:
    if entry.path.isupper():
        if not os.environ.get(entry.path):
            raise Missing(f"{entry.path} names no checkout")
        return os.environ[entry.path]
    return entry.path


def turns(names: Sequence[str], requests: int, block: int) -> Iterator[tuple[str, int, int]]:
    """`(name, first, last)` of each turn: all play a block before one plays the next, another one first each time."""
    for number, first in enumerate(range(0, requests, block)):
        shift = number % len(names)
        for name in (*names[shift:], *names[:shift]):
            yield name, first, min(first + block, requests)


def play(entries: Sequence[Entry], case: Case, block_size: int, block: int) -> dict[str, Process]:
    """All contenders play `case` in turns, one process each."""
    processes = {}
    for entry in entries:
        print(f"    {entry.name}", file=sys.stderr)
        processes[entry.name] = Process(entry, case, block_size)
    for name, first, last in turns(list(processes), case.requests, block):
        processes[name].play(first, last)
    for process in processes.values():
        process.close()
    return processes
