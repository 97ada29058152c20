"""Subtle faults in production code, and the hunt for each: which seed of the world notices it.

`python -m tests.world.mutations [NAME ...]` runs each mutant in a process of its own, the fixed seeds of the first tier
first, and prints the seed that found it.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import subprocess
import sys
from typing import Any, NamedTuple

PACKAGE = "fastdeploy_kvcache_v1"


class Mutation(NamedTuple):
    """`was` stands once in `module`, a name below the package, and becomes `now`."""

    name: str
    module: str
    was: str
    now: str


REQUESTS, TIERING, LOADS = "scheduler.request_table", "scheduler.tiering", "scheduler.load_table"
STORES, TOLD, RESIDENCY = "scheduler.store_table", "scheduler.told_copies", "scheduler.residency"
HAZARDS, TRANSFERS = "worker.hazards", "worker.transfer_manager"
ENGINE, WORKER = "fastdeploy_integration.engine", "fastdeploy_integration.worker"
TABLES, CACHE, TRACKER = f"{WORKER}.running_tables", f"{WORKER}.worker_cache", f"{WORKER}.pass_tracker"
COPIES, TARGET = "storage.engine.open_copies", "storage.engine.target"
PEERS, REMOTE = "embedded.engine.peer_requests", "embedded.engine.remote_prefills"
ADAPTER, LOST, SAME_ID = f"{ENGINE}.adapter", f"{ENGINE}.lost_batches", f"{ENGINE}.same_id"

ROWS = [
    # name, module, was, now
    # ---- the embedded engine and its roles
    (
        "a fetching request that ends gives its slots back",
        PEERS,
        "        if generation.state is State.FETCHING:\n            assert",
        "        if False:\n            assert",
    ),
    (
        "what another server reads is given away",
        PEERS,
        "        self._scheduler.set_aside(generation)\n        self._computed[generation.request_id] = generation\n"
        "        return True",
        "        return False",
    ),
    (
        "a request goes on before its fetch has ended",
        REMOTE,
        "        if known is None or known.end is None:\n            return",
        "        if known is None:\n            return",
    ),
    (
        "without a first token nothing computes it",
        REMOTE,
        "            num_computed = num_prompt if known.answer is not None else num_prompt - 1",
        "            num_computed = num_prompt",
    ),
    # ---- scheduler
    (
        "a match reaches the last token",
        REQUESTS,
        "max(0, sequence.num_tokens - 1) // self._block_size)\n        limit = limit if",
        "sequence.num_tokens // self._block_size)\n        limit = limit if",
    ),
    ("a store's reads are not counted", STORES, "                self._residency.begin_reading(read, reader)\n", ""),
    ("the pool shrinks under a copy", TIERING, "(above - evictable) | to_copy | read", "(above - evictable) | read"),
    (
        "what does not write is found",
        REQUESTS,
        "return self._caching and is_intact and request.sequence.access.writes",
        "return self._caching and is_intact",
    ),
    # ---- worker
    (
        "a write does not wait for a copy that reads",
        HAZARDS,
        "if use.reads & written:",
        "if use.reads & written and use.actor is not Actor.OUTPUT:",
    ),
    (
        "a host slot is read before it is filled",
        HAZARDS,
        "if use.writes & read:",
        "if use.writes & read and self.name == 'device':",
    ),
    (
        "a row stands still between passes",
        TABLES,
        "self._numbers[_STOP] += self._numbers[_PER_PASS]",
        "self._numbers[_STOP] += 0",
    ),
    (
        "a chunk writes nothing",
        TABLES,
        "self._begin(task.idx, table, start=start, end=end, low=end)",
        "self._begin(task.idx, table, start=end, end=end, low=end)",
    ),
    ("an earlier swap-in is not awaited", CACHE, "            if counter is not layered:\n", "            if False:\n"),
    (
        "a pass overwrites what is copied",
        CACHE,
        "late = writes if layered is None else writes - layered.target_slots",
        "late = SlotSet()",
    ),
    (
        "a pass that writes is forgotten",
        CACHE,
        "event = self._controller.after_compute(reads, writes)",
        "event = self._controller.after_compute(reads, SlotSet())",
    ),
    (
        "a pass that reads is forgotten",
        CACHE,
        "event = self._controller.after_compute(reads, writes)",
        "event = self._controller.after_compute(SlotSet(), writes)",
    ),
    (
        "a layer is filled before it was saved",
        TRANSFERS,
        "                stream.wait_event(eviction[layer])\n",
        "                pass\n",
    ),
    (
        "a slot is free one layer early",
        TRANSFERS,
        "                stream.enqueue(ops.swap_cache_per_layer, layer_to, layer_of, runs)\n"
        "                layer_events.append(stream.record_event())",
        "                layer_events.append(stream.record_event())\n"
        "                stream.enqueue(ops.swap_cache_per_layer, layer_to, layer_of, runs)",
    ),
    (
        "copies do not wait for their target",
        TRANSFERS,
        "        waits += self._tiers[metadata.target].hazards.before(actor, writes=slots[1])\n",
        "",
    ),
    (
        "a copy is said to have ended a step early",
        TRANSFERS,
        "return TransferReport(results, waited, oldest - 1)",
        "return TransferReport(results, waited, oldest)",
    ),
    ("a pass is said to have ended early", TRACKER, "if event is not None and not event.done():", "if False:"),
    (
        "a row's older blocks are not read",
        TABLES,
        "self._read |= row.slots | row.extended",
        "self._read |= row.extended",
    ),
    # ---- storage
    ("the fastest rank counts", COPIES, "through = min(self._ended_through)", "through = max(self._ended_through)"),
    (
        "a slot that is filled again is stored",
        COPIES,
        "if self._last_filled.get(slot) == step)",
        "if slot in self._last_filled)",
    ),
    (
        "blocks keep their name when weights change",
        f"{ENGINE}.storage",
        "epoch = self._weight_epoch or self._namespace.weight_epoch",
        "epoch = self._namespace.weight_epoch",
    ),
    # ---- hosts and the adapter
    (
        "a lost order is not told again",
        LOST,
        '            if task.task_type.name != "PREFILL":\n                again.append(task)',
        '            if task.task_type.name != "PREFILL":\n                pass',
    ),
    (
        "an unconfirmed id is free",
        SAME_ID,
        "return any(request_id in ids for ids in unconfirmed) or any(",
        "return any(",
    ),
    (
        "copies are lost with their batch",
        ADAPTER,
        "            if self._outbox.carries_copies:\n",
        "            if False:\n",
    ),
    (
        "a lost prefill runs on",
        LOST,
        "                again += _preempt(manager, task, leaves=preempted_leave)",
        "                _preempt(manager, task, leaves=preempted_leave)",
    ),
    # ---- not found by 40 seeds of every scenario: the world has no event yet that meets them, or another net holds
    (
        "what a step reads is lent at once",
        TIERING,
        "return open_step if is_read else open_step - 1",
        "return open_step - 1",
    ),
    ("a run that was cut is not searched", TOLD, "                run = run.parent", "                break"),
    ("an open copy is stored", TIERING, "run.host is not None and run.open is None and", "run.host is not None and"),
    ("a load does not wait for copies", TARGET, "return self._copies.have_ended(step)", "return True"),
    (
        "a pass that began later counts",
        f"{ENGINE}.rank_passes",
        "each.step >= step and each.at >= since for",
        "each.step >= step for",
    ),
    (
        "a doubt is over with the lost step",
        f"{ENGINE}.rank_passes",
        "-1 if is_lasting else self._told + 1",
        "-1 if is_lasting else self._told",
    ),
    (
        "a lost batch leaves no hole",
        ADAPTER,
        "self._records[request_id].has_hole = True",
        "self._records[request_id].has_hole = False",
    ),
    (
        "the sampled token is cached",
        ADAPTER,
        "self._hand_over(task, record, (record.tokens.num_tokens - 1) // self._block_size)\n            self._commit",
        "self._hand_over(task, record, record.tokens.num_tokens // self._block_size)\n            self._commit",
    ),
    (
        "a table of a lost batch is told though it changed",
        LOST,
        "return request is not None and request.block_tables is task.block_tables",
        "return request is not None",
    ),
    (
        "a record is found by its id",
        ADAPTER,
        "return record if record is not None and record.tokens.task is task else None",
        "return record",
    ),
    (
        "a failure is told after a match",
        ADAPTER,
        "                self._prefixes_lost(self.manager.transfer_failed(result))",
        "                pass",
    ),
    (
        "a match that was not scheduled is kept",
        ADAPTER,
        "        for task in self._batch.matched():\n            self._roll_back(task)",
        "        pass",
    ),
]
MUTATIONS = [Mutation(*row) for row in ROWS]


class _Loader(importlib.machinery.SourceFileLoader):
    """Compiles the mutant instead."""

    mutation: Mutation

    def get_code(self, fullname: str) -> Any:
        source = self.get_source(fullname)
        assert source is not None
        assert source.count(self.mutation.was) == 1, f"{self.mutation.name}: its text is not once in {fullname}"
        return compile(source.replace(self.mutation.was, self.mutation.now), self.path, "exec")


class _Finder:
    def __init__(self, mutation: Mutation) -> None:
        self._mutation = mutation

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != f"{PACKAGE}.{self._mutation.module}":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        assert spec is not None
        assert spec.origin is not None
        loader = _Loader(fullname, spec.origin)
        loader.mutation = self._mutation
        return importlib.util.spec_from_file_location(fullname, spec.origin, loader=loader)


def hunt(mutation: Mutation, seeds: int, events: int) -> int:
    sys.meta_path.insert(0, _Finder(mutation))  # type: ignore[arg-type]
    from .scenarios import SCENARIOS
    from .trial import line, try_run
    from .world import Run

    for seed in range(seeds):
        for scenario in SCENARIOS:
            run = Run(scenario, seed, range(events))
            result = try_run(run)
            if result.error is not None:
                print(f"{mutation.name}: seed {seed}: {result.error[:110]}\n    {line(run)}", flush=True)
                return 0
    print(f"{mutation.name}: SURVIVES {seeds} seeds", flush=True)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.world.mutations")
    parser.add_argument("names", nargs="*", help="part of a name; all without")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--here", action="store_true", help="in this process, which is of no use afterwards")
    chosen = parser.parse_args()
    mutations = [each for each in MUTATIONS if not chosen.names or any(name in each.name for name in chosen.names)]
    if chosen.here:
        return hunt(mutations[0], chosen.seeds, chosen.events)
    command = [sys.executable, "-m", "tests.world.mutations", "--here", f"--seeds={chosen.seeds}"]
    survivors = [
        subprocess.run([*command, f"--events={chosen.events}", "--", each.name], check=False).returncode
        for each in mutations
    ]
    print(f"{len(mutations) - sum(map(bool, survivors))} of {len(mutations)} found")
    return 1 if any(survivors) else 0


if __name__ == "__main__":
    sys.exit(main())
