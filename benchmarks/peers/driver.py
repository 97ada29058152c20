"""Contenders as processes that take turns: in each round every one plays the same range of requests."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple

from environments import ROOT, Missing, python_of

PATIENCE_S = 100
"""Of calls in one play of a case. A contender that takes longer is stopped, for it would take hours."""

FOLDER = Path(__file__).resolve().parent


class Entry(NamedTuple):
    """A contender: its row's name, the environment and adapter, and the adapter's `kind`."""

    name: str
    environment: str
    adapter: str
    kind: str
    checkout: str = ""
    """The variable that names the engine's source, where no wheel is installed."""
    tiers: tuple[int, ...] = (1, 2)
    """It plays the cases of so many tiers."""


class Case(NamedTuple):
    prompts: Path
    requests: int
    device: int
    host: int = 0
    window: int = 1

    @property
    def tiers(self) -> int:
        return 2 if self.host else 1

    def given(self, block_size: int) -> dict[str, Any]:
        """What a player makes of it, without `requests`, in JSON's types."""
        return {"prompts": str(self.prompts), "device": self.device, "host": self.host, "window": self.window,
                "block_size": block_size}  # fmt: skip


class Play(NamedTuple):
    """What a contender made of a case. `why` says why there is no result, `lie` what the shadow plane caught in it."""

    version: str
    why: str
    lie: str
    played: list[list[float]]
    """What the player returns of each request."""


class Process:
    """A contender's process, which plays one case after the other. One that died or was closed is started again for
    the next case.

    `why` and `lie` as in a `Play` of the present case.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry, self.why, self.lie, self.version = entry, "", "", ""
        self.played: list[list[float]] = []
        self._process: subprocess.Popen[str] | None = None
        try:
            self._source = source_of(entry)  # before an environment is made for nothing
            self._command = [str(python_of(entry.environment)), "-W", "ignore", str(FOLDER / "player.py")]
        except Missing as missing:
            self._command, self.why = [], f"not here: {missing}"

    def make(self, case: Case, block_size: int) -> None:
        """Make the contender's manager for `case`."""
        if not self._command:
            return
        self.played, self.lie, self.why = [], "", ""
        if answer := self._ask({"make": case.given(block_size)}, "not here"):
            self.version = answer["version"]

    def play(self, first: int, last: int) -> None:
        """Play requests `[first, last)`. One that dies in it has a reason afterwards, and plays no more of the case."""
        if not self.why and (answer := self._ask({"play": [first, last]}, "died")):
            self.played += answer["played"]
            self.lie = self.lie or answer["lie"]
            if sum(seconds for seconds, *_ in self.played) > PATIENCE_S:
                self.why = f"stopped: {len(self.played):,} requests took {PATIENCE_S:,} s"

    def result(self) -> Play:
        return Play(self.version, self.why, self.lie, self.played)

    def memory(self, case: Case, block_size: int) -> dict[str, float]:
        """`cached_blocks` and `bytes_per_block` after all prompts; to be asked first. Empty where it failed."""
        return {} if self.why else self._ask({"memory": case.given(block_size)}, "died") or {}

    def close(self) -> None:
        if (process := self._process) is not None:
            self._process = None
            with suppress(BrokenPipeError):  # an order that was never read
                process.communicate()
            self._errors.close()

    def _start(self) -> subprocess.Popen[str]:
        self._errors = TemporaryFile()  # noqa: SIM115 (`close` closes it)
        self._process = subprocess.Popen(
            [*self._command, self.entry.adapter, self.entry.kind], env={**os.environ, "PYTHONPATH": self._source},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True,
        )  # fmt: skip
        return self._process

    def _ask(self, order: dict[str, Any], what: str) -> Any:
        """The answer, or None and a reason that begins with `what`."""
        process = self._process or self._start()
        assert process.stdin is not None and process.stdout is not None  # noqa: PT018
        with suppress(BrokenPipeError):  # the missing answer says it
            print(json.dumps(order), file=process.stdin, flush=True)
        if line := process.stdout.readline():
            return json.loads(line)
        code = process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        self.why = f"{what}: {last[0][:160] if last else f'exit code {code}'}"
        self.close()
        return None


def say_needs(entries: Iterable[Entry], *, download_gib: int, room_gib: int, minutes: int) -> None:
    """Say what making the environments costs, and stop where the disk has no room for them."""
    names = {entry.environment for entry in entries} - {"dev", "fastdeploy"}
    missing = sorted(name for name in names if not (ROOT / f".venv-peers-{name}").exists())
    free = shutil.disk_usage(ROOT).free / (1 << 30)
    if missing:
        print(
            f"environments to make: {', '.join(missing)}: {download_gib} GiB of downloads, {room_gib} GiB of disk "
            f"({free:.0f} are free). The run takes about {minutes} minutes.", file=sys.stderr,
        )  # fmt: skip
        if free < room_gib:
            sys.exit(f"error: {free:.0f} GiB are free, expected {room_gib}: make room, or add --only ours")


def source_of(entry: Entry) -> str:
    """What stands in PYTHONPATH: the checkout that a variable names, and this one."""
    checkout = os.environ.get(entry.checkout, "")
    if entry.checkout and not (Path(checkout) / "fastdeploy").is_dir():
        raise Missing(f"{entry.checkout} names no checkout of FastDeploy")
    here = [str(ROOT)] if entry.environment in ("dev", "fastdeploy") else []
    return os.pathsep.join([*filter(None, [checkout]), *here])


def turns(names: Sequence[str], requests: int, block: int) -> Iterator[tuple[str, int, int]]:
    """`(name, first, last)` of each turn: all play a block before one plays the next, another one first each time."""
    for number, first in enumerate(range(0, requests, block)):
        for turn in range(len(names)):
            yield names[(number + turn) % len(names)], first, min(first + block, requests)


def play(processes: dict[str, Process], case: Case, block_size: int, block: int) -> None:
    """All contenders play `case` in turns."""
    for process in processes.values():
        process.make(case, block_size)
    for name, first, last in turns(list(processes), case.requests, block):
        processes[name].play(first, last)
