"""Time per request of this CacheManager beside those of other engines, from their released wheels, on a CPU.
Each has a process and an environment of its own; they play the same prompts in turns of 200 requests.

    ./scripts/bench peers [--only NAME...]

`--only ours` needs no other environment. A shadow data plane checks that each finds only what was computed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from _support import ROOT, begin, generated_trace, median, percentile, sized, trace_name

from fastdeploy_kvcache_v1.lab.replay.hashes import TraceHasher
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from driver import Case, Entry, Process, play
from prompts import write

BLOCK_SIZE = 64
TURN = sized(200, 10)
WARM_UP = 5
"""Turns that are not counted."""

ENTRIES = (
    Entry("ours, adaptive", "dev", "ours", "adaptive"),
    Entry("ours, lru", "dev", "ours", "lru"),
    Entry("vLLM", "vllm", "vllm_manager", "sha256"),
    Entry("SGLang, Rust core", "sglang", "sglang_tree", "unified rust"),
    Entry("SGLang, Python core", "sglang", "sglang_tree", "unified python"),
    Entry("SGLang, Rust core alone", "sglang", "sglang_core", "unified rust"),
    Entry("FastDeploy 2.5", "fastdeploy", "fastdeploy_managers", "2.5", "FASTDEPLOY_25"),
    Entry("FastDeploy 2.6", "fastdeploy", "fastdeploy_managers", "2.6", "FASTDEPLOY_26"),
    Entry("FastDeploy develop, v1", "fastdeploy", "fastdeploy_managers", "develop", "FASTDEPLOY_DEVELOP"),
)
OURS = ENTRIES[0].name
COMPARED = ("median_us", "mean_us", "cpu_us", "total_cpu_us")
ROOM_GIB, MINUTES = 14, 40


def main() -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders whose names begin so")
        parser.add_argument(
            "--requests", type=int, default=sized(None, 100), metavar="N", help="of each trace, the first N"
        )

    run = begin(trace=True, variables=("FASTDEPLOY_25", "FASTDEPLOY_26", "FASTDEPLOY_DEVELOP"), configure=configure)
    only = tuple(run.options.only or ("",))
    entries = [entry for entry in ENTRIES if entry.name.startswith(only)]
    say_needs(entries)
    processes = {entry.name: Process(entry) for entry in entries}
    sizes = memory(processes, run.options.trace)
    cases = {}
    for name, case in make_cases(run.options.trace, run.options.requests):
        print(name, file=sys.stderr)
        play(processes, case, BLOCK_SIZE, TURN)
        cases[name] = measured(processes)
    for process in processes.values():
        process.close()
    run.save(
        {
            "trace": trace_name(run.options.trace), "block_size": BLOCK_SIZE, "turn": TURN, "warm_up": WARM_UP * TURN,
            "cases": cases, "memory": sizes,
        }
    )  # fmt: skip


def say_needs(entries: Iterable[Entry]) -> None:
    """Say what making the environments costs, and stop where the disk has no room for them."""
    missing = {entry.environment for entry in entries if entry.environment in ("vllm", "sglang")}
    missing = {name for name in missing if not (ROOT / f".venv-peers-{name}").exists()}
    free = shutil.disk_usage(ROOT).free / (1 << 30)
    if missing:
        print(
            f"environments to make: {', '.join(sorted(missing))}: 5 GiB of downloads, {ROOM_GIB} GiB of disk "
            f"({free:.0f} are free). The run takes about {sized(MINUTES, 4)} minutes.", file=sys.stderr,
        )  # fmt: skip
        if free < ROOM_GIB:
            sys.exit(f"error: {free:.0f} GiB are free, expected {ROOM_GIB}: make room, or add --only ours")


def make_cases(trace: Path, requests: int | None) -> Iterable[tuple[str, Case]]:
    conversations = prompts_of("trace", trace, requests)
    agents = prompts_of("agents", generated_trace("agents", sized(4_000, 100)), requests)
    turns = sized(2_000, 100)
    path = ROOT / "build" / "peers" / "conversation.npz"
    write(path, ((range(turn + 1), (turn + 1) * BLOCK_SIZE + 1) for turn in range(turns)))
    for device in sized((5_000, 20_000, 100_000), (20_000,)):
        yield f"trace, {device:,} blocks", Case(conversations[0], conversations[1], device)
    size = 20_000
    yield f"trace, {size:,} blocks, 8 open", Case(conversations[0], conversations[1], size, window=8)
    yield f"agents, {size:,} blocks", Case(agents[0], agents[1], size)
    yield f"a conversation of {turns:,} turns, {size:,} blocks", Case(path, turns, size)


def prompts_of(name: str, trace: Path, limit: int | None) -> tuple[Path, int]:
    hasher = TraceHasher(BLOCK_SIZE)
    requests = read_trace(trace, limit)
    path = ROOT / "build" / "peers" / f"{name}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    write(path, ((hasher.prompt_hashes(request), request.input_length) for request in requests))
    return path, len(requests)


def measured(processes: dict[str, Process]) -> dict[str, Any]:
    """Rows of one case; `ours_over_it` is our time over the contender's."""
    rows = {each: row(process) for each, process in processes.items()}
    for each in rows.values():
        if "mean_us" in each and "mean_us" in rows.get(OURS, {}):
            each["ours_over_it"] = {key: rows[OURS][key] / each[key] for key in COMPARED}
    return rows


def row(process: Process) -> dict[str, Any]:
    if process.why:
        return {"why": process.why}
    seconds, cpu, _, hash_cpu, hits, tokens = zip(*process.played[WARM_UP * TURN :], strict=True)
    count = len(seconds)
    return {
        "version": process.version, "lie": process.lie, "requests": count,
        "median_us": 1e6 * median(seconds), "mean_us": 1e6 * sum(seconds) / count,
        "p99_us": 1e6 * percentile(seconds, 0.99), "cpu_us": 1e6 * sum(cpu) / count,
        "hash_cpu_us": 1e6 * sum(hash_cpu) / count, "total_cpu_us": 1e6 * (sum(cpu) + sum(hash_cpu)) / count,
        "hit_share": sum(hits) / sum(tokens),
    }  # fmt: skip


def memory(processes: dict[str, Process], trace: Path) -> dict[str, dict[str, Any]]:
    """Measured first, in processes that have played nothing."""
    path, _ = prompts_of("memory", trace, sized(1_000, 60))
    play(processes, Case(path, 0, sized(100_000, 10_000)), BLOCK_SIZE, TURN)
    return {name: process.memory() or {"why": process.why} for name, process in processes.items()}


if __name__ == "__main__":
    main()
