"""One contender in a process of its own: plays ranges of requests when the driver asks, and answers with times.

    player.py ADAPTER KIND

ADAPTER is a module whose `CONTENDER` is a `contender.Contender`.

Orders come as lines of JSON on standard input, and each is answered by a line on the first standard output: `make` a
manager for a case, `play` requests, measure `memory`. What an engine prints goes to standard error.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

from contender import Contender
from prompts import Prompts
from shadow import Lie, ShadowPlane


class Player:
    """Keeps `window` requests open. `lie` is the first one that the shadow plane caught."""

    def __init__(self, contender: Contender, prompts: Prompts, block_size: int, window: int) -> None:
        self.contender, self.prompts = contender, prompts
        self.block_size, self.window = block_size, window
        self.plane = ShadowPlane()
        self.open: deque[tuple[Any, list[int]]] = deque()
        self.lie = ""

    def play(self, number: int) -> tuple[float, float, float, float, int, int, int, int]:
        """Returns seconds and CPU seconds in the manager's calls, both for the hashes, tokens that hit, tokens, and
        blocks copied to the host and back.
        """
        contender, names = self.contender, self.prompts.names(number)
        tokens: list[int] = self.prompts.tokens(number, self.block_size).tolist()
        contender.now = self.prompts.arrival(number)
        request = contender.arrive(number, tokens)
        keyed = timed(contender.key, request)
        finished = (0.0, 0.0)
        if len(self.open) == self.window:
            ended, table = self.open.popleft()
            finished = timed(contender.finish, ended)
            self.plane.finish(table)
        started = timed(contender.start, request)
        before = self._copy()
        table, matched = contender.table(request)
        self._check(self.plane.start, names, table, matched)
        committed = timed(contender.commit, request)
        self.plane.commit(names, table)
        copied = map(sum, zip(before, self._copy(), strict=True))
        self.open.append((request, table))
        seconds, cpu = map(sum, zip(finished, started, committed, strict=True))
        return seconds, cpu, *keyed, min(matched * self.block_size, len(tokens)), len(tokens), *copied

    def _copy(self) -> tuple[int, int]:
        """Make the planned copies on the plane. Returns the blocks copied to the host and back."""
        counts = [0, 0]
        for copies in self.contender.copies():
            self._check(self.plane.copy, *copies)
            counts[not copies.is_out] += len(copies.sources)
        return counts[0], counts[1]

    def _check(self, check: Callable[..., None], *given: Any) -> None:
        try:
            check(*given)
        except Lie as lie:
            self.lie = self.lie or str(lie)


def timed(verb: Any, request: Any) -> tuple[float, float]:
    cpu, begin = process_time(), perf_counter()
    verb(request)
    end = perf_counter()
    return end - begin, process_time() - cpu


def memory(make: Callable[[], Player]) -> dict[str, float]:
    """Bytes of this process, native ones included, that a manager costs per cached block after all prompts."""
    player = make()
    for number in range(len(player.prompts)):  # afterwards the heap has room for the prompts
        player.contender.arrive(number, player.prompts.tokens(number, player.block_size).tolist())
    del player
    before = private_bytes()
    player = make()
    for number in range(len(player.prompts)):
        player.play(number)
    while player.open:
        player.contender.finish(player.open.popleft()[0])
    blocks = player.contender.cached_blocks()
    player.plane = ShadowPlane()
    return {"cached_blocks": blocks, "bytes_per_block": (private_bytes() - before) / max(1, blocks)}


def private_bytes() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty", "Private_Clean")))


def main() -> None:
    adapter, kind = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    engine = importlib.import_module(adapter).CONTENDER

    def make(device: int, host: int, block_size: int, window: int, prompts: str) -> Player:
        contender = engine(device, host, block_size, kind)
        return Player(contender, Prompts(Path(prompts)), block_size, window)

    for line in sys.stdin:
        ((order, given),) = json.loads(line).items()
        if order == "make":
            player = None  # before the next one is made
            gc.unfreeze()  # a frozen manager in a cycle would never leave, with all that it keeps
            gc.collect()
            player = make(**given)
            gc.collect()
            gc.freeze()  # so that no collection walks the engine's modules
            answer: Any = {"version": player.contender.version}
        elif order == "play":
            answer = {"played": [player.play(number) for number in range(*given)], "lie": player.lie}
        else:
            answer = memory(partial(make, **given))
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main()
