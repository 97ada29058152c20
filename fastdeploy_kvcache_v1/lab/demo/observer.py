"""Reads from a server, after each request: sources of the prompt, times, and contents of each tier."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import httpx2

from ...page.state import STATE_PATH
from ...telemetry.drawing import Cell
from ...telemetry.metrics import PREFIX
from ..server.client import Answer
from .scenario import BLOCK_SIZE

COUNTS = re.compile(rf"^{re.escape(PREFIX)}(\w+)_total(?:{{([^}}]*)}})? (\S+)$", re.MULTILINE)
SETTLE_TIMEOUT_S = 3.0
TIERS = ("device", "host", "disk")


@dataclass(frozen=True)
class Seen:
    """The state of a server after a request."""

    answer: Answer
    sources: tuple[int, int, int, int]
    """Prompt tokens that were computed, and that came from the device, the host and the disk."""
    times: Mapping[str, float]
    """Seconds by name; empty where a server does not tell them."""
    tiers: Mapping[str, list[Cell]]
    """Cells by tier, a free one for each free slot."""


class Observer:
    """Of one server, which serves nothing else meanwhile."""

    def __init__(self, url: str, *, num_on_disk: int = 0) -> None:
        """`num_on_disk`: blocks that are stored before the first request."""
        self._url = url
        self._num_on_disk = num_on_disk
        self._counts: Counter[str] = Counter()
        self._kinds: dict[str, str] = {}
        """Kind of the request that first had a prompt, by the prompt's name."""

    @property
    def num_on_disk(self) -> int:
        return self._num_on_disk + self._counts["stored"]

    def look(self, answer: Answer, kind: str) -> Seen:
        """After a request whose cells get the colour `kind`."""
        self._settle()
        before, self._counts = self._counts, self._read_counts(self._counts, answer.cached_tokens)
        new = self._counts - before
        disk = min(new["loaded_blocks"] * BLOCK_SIZE, new["host_hit_tokens"])
        host = new["host_hit_tokens"] - disk
        sources = (answer.prompt_tokens - answer.cached_tokens, answer.cached_tokens - host - disk, host, disk)
        state = self._get(STATE_PATH)
        times = {name: value for each in state["times"][:1] for name, value in each.items() if name.endswith("_s")}
        return Seen(answer, sources, times, self._cells(state["cache"], kind, sources))

    def _get(self, path: str) -> dict[str, Any]:
        """Empty where a server has no such page."""
        response = httpx2.get(self._url + path, timeout=60)
        return dict(response.json()) if response.is_success else {}

    def _settle(self) -> None:
        """Wait until blocks are copied and stored: this is not the next request's time."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        while not all(self._get("/debug/check").get(each, True) for each in ("idle", "storage_idle")):
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def _read_counts(self, before: Counter[str], cached_tokens: int) -> Counter[str]:
        """FastDeploy publishes its counts now and then: once the hits are there."""
        deadline = time.monotonic() + SETTLE_TIMEOUT_S
        wanted = before["device_hit_tokens"] + before["host_hit_tokens"] + cached_tokens
        while True:
            counts: Counter[str] = Counter()
            for name, labels, value in COUNTS.findall(httpx2.get(f"{self._url}/metrics", timeout=60).text):
                counts["stored" if name == "storage_blocks" and "store" in labels else name] += int(float(value))
            if counts["device_hit_tokens"] + counts["host_hit_tokens"] >= wanted or time.monotonic() > deadline:
                return counts
            time.sleep(0.05)

    def _cells(self, cache: dict[str, Any], kind: str, sources: tuple[int, ...]) -> dict[str, list[Cell]]:
        runs: list[dict[str, Any]] = cache["runs"]
        roots: list[str] = []
        for run in runs:
            roots.append(run["name"] if run["parent"] is None else roots[run["parent"]])
        for name in roots:
            self._kinds.setdefault(name, kind)
        prompt = next((root for root in roots if self._kinds[root] == kind), None)
        path = list(_blocks_of(runs, prompt))
        first = [count // BLOCK_SIZE for count in sources[1:]]
        hits = {"device": path[: first[0]], "host": path[first[0] : first[0] + first[1]]}
        cells = {}
        for tier in ("device", "host"):
            cells[tier] = [Cell("free")] * cache[tier]["size"]
            marked = {block[tier] for block in hits[tier]}
            for run, root in zip(runs, roots, strict=True):
                for slot in run[f"{tier}_slots"]:
                    cells[tier][slot] = Cell(self._kinds[root], slot in marked)
        stored = Counter[str]()
        for run, root in zip(runs, roots, strict=True):
            stored[self._kinds[root]] += run["num_stored"]
        cells["disk"] = [
            Cell(name, name == kind and number < first[2])
            for name, count in sorted(stored.items(), reverse=True)
            for number in range(count)
        ]
        cells["disk"] += [Cell("disk")] * (self.num_on_disk - len(cells["disk"]))
        return cells


def _blocks_of(runs: list[dict[str, Any]], prompt: str | None) -> Iterator[dict[str, int | None]]:
    """The slots of each block of the newest prompt that begins with the run `prompt`, by tier."""
    place = next((number for number, run in enumerate(runs) if run["parent"] is None and run["name"] == prompt), None)
    while place is not None:
        run = runs[place]
        for device, host in zip_longest(run["device_slots"], run["host_slots"]):
            yield {"device": device, "host": host}
        place = next((number for number, below in enumerate(runs) if below["parent"] == place), None)


Results = Mapping[str, list[Seen]]
"""By the name of the set-up: its requests so far, in the order of `scenario.ASKED`."""
