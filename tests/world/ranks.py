"""Ranks of a FastDeploy worker: the real `WorkerCache` over a device that the world runs, and a model in tags.

A pass writes the tags of the new positions of all rows, layer by layer, then every row reads its whole prefix. The
tokens are known at submission. The reads are compared when the device runs them.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.contract.messages import WorkerReport
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import TaskKind
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.worker_cache import MAIN, WorkerCache

from .memory import GARBAGE, UNWRITTEN, Prefix, Tags, WrongError
from .store import RankMemory
from .streams import VirtualDevice

LAYERS = 2
OWN_NOTHING = 1 << 40
"""A position beyond every row."""

RELEASED = "released"
"""In place of a token: the row was removed, because its request was preempted or aborted."""


class Row:
    def __init__(self, task: Any, prefix: Prefix) -> None:
        self.uid, self.prefix = task.uid, prefix
        self.computed = self.target = task.prefill_start_index
        self.own_from = task.prefill_start_index if task.skip_writing_prefix_cache else OWN_NOTHING
        """From this position on, no other request may hit its blocks."""
        self.limit = len(task.prompt_token_ids) + task.max_tokens
        """Prompt and output, in tokens."""


class Tensors(RankMemory):
    """The cache tensors of a rank, and its model in tags."""

    def __init__(
        self, number: int, device: VirtualDevice, *, blocks: int, block_size: int, tags: Tags, on_device: bool
    ) -> None:
        super().__init__(on_device=on_device)
        self.number, self.device, self.tags, self.block_size = number, device, tags, block_size
        self.layers = [np.full((blocks, block_size), UNWRITTEN, np.int64) for _ in range(LAYERS)]
        self.by_name = {str(number): layer for number, layer in enumerate(self.layers)}
        self.layout = CacheLayout(LAYERS, (RoleSpec("key", (1, block_size, 2), "float32"),))
        self.using: deque[tuple[set[int], set[int]]] = deque()

    def _submit(
        self, work: Sequence[tuple[Row, int, int]], before_layer: Callable[[int], object], void: Sequence[str] = ()
    ) -> None:
        """Submit a pass over rows with their positions `[start, end)`. A reason in `void` makes its results garbage."""
        stream, plan, read, written = self.device.compute_stream, [], set[int](), set[int]()
        for row, start, end in work:
            plan.append(self._places(row, start, end))
            blocks = -(-end // self.block_size)
            read.update(row.table[:blocks])
            written.update(row.table[start // self.block_size : blocks])
        self.using.append((read, written))
        try:
            for number, layer in enumerate(self.layers if work else ()):
                before_layer(number)
                stream.submit(self._attend, layer, number, plan, void)
        finally:
            stream.submit(self.using.popleft)

    def _places(self, row: Row, start: int, end: int) -> tuple[Row, Any, Any, int]:
        positions = np.arange(end)
        slots = np.array(row.table, np.int64)[positions // self.block_size]
        tags = np.array(row.prefix.chain[1 : end + 1], np.int64)
        tags[row.own_from :] += (row.uid + 1) * OWN_NOTHING
        return row, slots * self.block_size + positions % self.block_size, tags, start

    def _attend(self, layer: Any, number: int, plan: Sequence[tuple[Row, Any, Any, int]], void: Sequence[str]) -> None:
        """Write the new tags and compare the prefix. A void pass writes garbage."""
        flat = layer.reshape(-1)
        for _, places, tags, start in plan:
            flat[places[start:]] = GARBAGE if void else tags[start:] * LAYERS + number
        for row, places, tags, start in () if void else plan:
            found = flat[places]
            self.tags.num_compared += len(found)
            wrong = np.flatnonzero(found != tags * LAYERS + number)
            if wrong.size:
                self._raise(row, int(wrong[0]), int(found[wrong[0]]), number, start)

    def _raise(self, row: Row, position: int, found: int, layer: int, start: int) -> None:
        place = f"rank {self.number} layer {layer} block {row.table[position // self.block_size]}"
        raise WrongError(
            f"request {row.uid} reads position {position} (computed from {start}), {place}: it holds "
            f"{self.tags.words(found // LAYERS if found > 0 else found)}, not {row.prefix.tokens[: position + 1]}"
        )


class Rank(Tensors):
    """A rank of a FastDeploy worker."""

    def __init__(
        self, number: int, device: VirtualDevice, *, blocks: int, host_blocks: int, block_size: int, tags: Tags,
        tell: Callable[[int, WorkerReport], None], clock: Callable[[], float], backend: str = "",
    ) -> None:  # fmt: skip
        on_device = backend == "attention_store"
        super().__init__(number, device, blocks=blocks, block_size=block_size, tags=tags, on_device=on_device)
        self.cache = WorkerCache(
            num_host_blocks=host_blocks, block_size=block_size, make_runtime=lambda: device,
            storage=self if backend else None, tell_copies=partial(tell, number), clock=clock, keep_host_memory=True,
        )  # fmt: skip
        self.cache.register(MAIN, self.layout, self.by_name, blocks)
        self.controller = self.cache._controller

    def submit(self, work: Sequence[tuple[Row, int, int]], finished: Callable[[], None], *, is_graph: bool) -> None:
        """Submit a forward pass. A graph waits for all layers at once."""
        counter = self.cache.begin_forward(layer_by_layer=not is_graph)
        self._submit(work, lambda layer: None if counter is None else counter.wait_for_layer(layer))
        self.device.compute_stream.submit(finished)
        self.cache.end_forward(is_idle=not work)


class Reports:
    """The ranks' reports of copies on their way to the engine: in order, and sometimes late."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self._underway: deque[tuple[int, WorkerReport]] = deque()
        self._arrived: list[tuple[int, WorkerReport]] = []
        self.events = [(8, self.arrive)]

    def tell(self, rank: int, report: WorkerReport) -> None:
        self._underway.append((rank, report))

    def arrive(self, rng: random.Random) -> None:
        while self._underway and not self._world.faults.strike("late report", rng):
            self._arrived.append(self._underway.popleft())

    is_idle = True
    """The engine may be idle before all reports have arrived."""

    def take(self) -> Sequence[tuple[int, WorkerReport]]:
        arrived, self._arrived = self._arrived, []
        return arrived


class Worker:
    """All ranks: each gets every batch, a pass ends when every rank has run it, and tokens arrive in order."""

    def __init__(self, ranks: Sequence[Rank], root: Callable[[Any], Any]) -> None:
        self.ranks, self.root = ranks, root
        self.rows: dict[int, Row] = {}
        self._released: dict[int, int] = {}
        self._passes: deque[tuple[dict[int, Any], list[Rank]]] = deque()
        """The message to the engine, and the ranks that have not run the pass yet."""
        self.num_passes = 0
        self._took = False

    def take(self, batch: bytes) -> None:
        """Receive a batch. As in the worker's loop, a pass runs before the next batch is received."""
        if self._took:
            self.run()
        self._took = True
        for rank in self.ranks:
            tasks = pickle.loads(batch)
            rank.cache.receive(tasks)
        for task in tasks:
            kind = task.task_type.value
            if kind == TaskKind.PREFILL:
                self._prefill(task)
            elif kind == TaskKind.DECODE:
                if task.idx in self.rows:  # else it ended while the batch was on its way
                    self.rows[task.idx].table = list(map(int, task.block_tables))
            else:
                self.rows.pop(task.idx, None)
                self._released[task.idx] = task.uid

    def _prefill(self, task: Any) -> None:
        row = self.rows.get(task.idx)
        if row is None or row.uid != task.uid or row.computed != task.prefill_start_index:
            prefix = Prefix(self.ranks[0].tags, self.root(task))
            prefix.extend([*task.prompt, *task.output_token_ids])
            row = self.rows[task.idx] = Row(task, prefix)
        self._released.pop(task.idx, None)
        row.table, row.target = list(map(int, task.block_tables)), task.prefill_end_index

    def run(self) -> None:
        """Submit one pass."""
        self._took = False
        work, message = [], {index: (RELEASED, uid, None) for index, uid in self._released.items()}
        self._released.clear()
        for index, row in list(self.rows.items()):
            if row.computed < row.target <= len(row.table) * self.ranks[0].block_size:
                work.append((row, row.computed, row.target))
                row.computed = row.target
                if row.target == len(row.prefix.tokens):
                    message[index] = (row.prefix.next_token, row.uid, row.prefix.root)
                    row.prefix.extend([row.prefix.next_token])
                    row.target += 1
                    if row.target >= row.limit:
                        del self.rows[index]
        if not work and not message:
            for rank in self.ranks:
                rank.cache.report_while_idle()
            return
        self.num_passes += bool(work)
        running = list(self.ranks)
        self._passes.append((message, running))
        for rank in self.ranks:
            rank.submit(work, partial(running.remove, rank), is_graph=self.num_passes % 3 == 0)

    def message(self) -> dict[int, Any] | None:
        """Return the message of the oldest pass, or None while it runs."""
        return self._passes.popleft()[0] if self._passes and not self._passes[0][1] else None

    def drop_rows(self) -> None:
        self.rows.clear()
        self._released.clear()

    @property
    def has_passes(self) -> bool:
        """Passes whose messages were not read yet."""
        return bool(self._passes)

    @property
    def is_idle(self) -> bool:
        return not self.rows and not self._passes and all(rank.device.is_idle for rank in self.ranks)

    def run_devices(self, rng: random.Random) -> None:
        rank, most = rng.choice(self.ranks), rng.choice([4, 40, 200])
        rank.device.run_some(rng, most)
