"""Time per request of this CacheManager beside those of other engines, from their released wheels, on a CPU.
Each plays the same prompts in an environment and processes of its own, in turns of 200 requests, several times.

The time of a request is the least of its plays, so what other programs on the machine cause is left out. A shadow data
plane checks that each finds only what was computed. FastDeploy's managers need a checkout, named by a variable. A
contender that this machine lacks is a row that says why; `--only ours` needs no other environment.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from _support import begin, generated_trace, median, percentile, sized, trace_name

from fastdeploy_kvcache_v1.lab.replay.hashes import TraceHasher
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from driver import Case, Entry, Play, Process, play, say_needs
from prompts import write

BLOCK_SIZE = 64
TURN = sized(200, 10)
LIVES = sized(2, 1)
"""Processes of a contender, one after the other: what slows one for its life, by where its memory lies, meets no other.
"""
PLAYS = 2
"""Of each case in a life: in the second one the kernel has given most memory already."""

WARM_UP = 0.2
"""Share of the requests that are played first and not counted."""
TIMES = 4
"""That a player returns of a request, before its counts."""

ENTRIES = (
    Entry("ours, adaptive", "dev", "ours", "adaptive"),
    Entry("ours, lru", "dev", "ours", "lru"),
    Entry("ours, adaptive, write_through", "dev", "ours", "adaptive write_through", tiers=(2,)),
    Entry("vLLM", "vllm", "vllm_manager", "sha256", tiers=(1,)),
    Entry("vLLM, CPU offloading", "vllm", "vllm_offloading", "lru", tiers=(2,)),
    Entry("vLLM, CPU offloading, ARC", "vllm", "vllm_offloading", "arc", tiers=(2,)),
    Entry("SGLang, Rust core", "sglang", "sglang_tree", "unified rust", tiers=(1,)),
    Entry("SGLang, Python core", "sglang", "sglang_tree", "unified python", tiers=(1,)),
    Entry("SGLang, Rust core alone", "sglang", "sglang_core", "unified rust", tiers=(1,)),
    Entry("SGLang, HiCache, Rust core", "sglang", "sglang_host", "unified rust, write_through", tiers=(2,)),
    Entry("SGLang, HiCache, Rust core, write_back", "sglang", "sglang_host", "unified rust, write_back", tiers=(2,)),
    Entry("SGLang, HiCache, Python core", "sglang", "sglang_host", "unified python, write_through", tiers=(2,)),
    Entry("FastDeploy 2.5", "fastdeploy", "fastdeploy_managers", "2.5", "FASTDEPLOY_25"),
    Entry("FastDeploy 2.6", "fastdeploy", "fastdeploy_managers", "2.6", "FASTDEPLOY_26"),
    Entry("FastDeploy develop, v1", "fastdeploy", "fastdeploy_managers", "develop", "FASTDEPLOY_DEVELOP"),
)


def main() -> None:
    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--only", nargs="+", metavar="NAME", help="contenders whose names begin so")
        parser.add_argument(
            "--requests", type=int, default=sized(2_000, 100), metavar="N", help="of each trace, the first N"
        )

    run = begin(trace=True, variables=("FASTDEPLOY_25", "FASTDEPLOY_26", "FASTDEPLOY_DEVELOP"), configure=configure)
    only = tuple(run.options.only or ("",))
    entries = [entry for entry in ENTRIES if entry.name.startswith(only)]
    say_needs(entries, download_gib=5, room_gib=14, minutes=sized(70, 4))
    with TemporaryDirectory() as folder:
        files = Files(Path(folder), run.options.trace, run.options.requests)
        processes = {
            tiers: {entry.name: Process(entry) for entry in entries if tiers in entry.tiers} for tiers in (1, 2)
        }
        sizes = memory(processes[1], files)
        cases = played(processes, {**dict(make_cases(files)), **dict(two_tiers(files))})
    run.save(
        {
            "trace": trace_name(run.options.trace), "block_size": BLOCK_SIZE, "turn": TURN, "plays": LIVES * PLAYS,
            "warm_up": WARM_UP, "cases": cases, "memory": sizes,
        }
    )  # fmt: skip


class Files(NamedTuple):
    """Where prompts are written for the contenders, and what they are made from."""

    folder: Path
    trace: Path
    most: int

    def of_trace(self, name: str, trace: Path, most: int) -> tuple[Path, int]:
        """A file of prompts, and their number."""
        hasher = TraceHasher(BLOCK_SIZE)
        requests = read_trace(trace, most)
        played = [(hasher.prompt_hashes(each), each.input_length, each.timestamp_ms / 1000) for each in requests]
        return self.write(name, played)

    def write(self, name: str, requests: Sequence[tuple[Sequence[Any], int, float]]) -> tuple[Path, int]:
        path = self.folder / f"{name}.npz"
        write(path, requests)
        return path, len(requests)


def make_cases(files: Files) -> Iterable[tuple[str, Case]]:
    trace = files.of_trace("trace", files.trace, files.most)
    agents = files.of_trace("agents", generated_trace("agents", sized(4_000, 100)), files.most)
    turns = min(2_000, files.most)
    told = [(range(turn + 1), (turn + 1) * BLOCK_SIZE + 1, float(turn)) for turn in range(turns)]
    conversation = files.write("turns", told)
    for device in sized((5_000, 20_000, 100_000), (20_000,)):
        yield f"trace, {device:,} blocks", Case(*trace, device)
    size = 20_000
    yield f"trace, {size:,} blocks, 8 open", Case(*trace, size, window=8)
    yield f"agents, {size:,} blocks", Case(*agents, size)
    yield f"a conversation of {turns:,} turns, {size:,} blocks", Case(*conversation, size)


def two_tiers(files: Files) -> Iterable[tuple[str, Case]]:
    trace = files.of_trace("trace", files.trace, files.most)
    device, host = sized((5_000, 20_000), (2_000, 4_000))
    yield f"trace, {device:,} blocks and {host:,} on the host", Case(*trace, device, host)


def played(processes: dict[int, dict[str, Process]], cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Rows by case and contender. All cases of a tier are played before any is played again: what slows a machine down,
    or one kind of program on it, often lasts for minutes.
    """
    plays: dict[str, dict[str, list[Play]]] = {name: {} for name in cases}
    for life, tiers, number in product(range(LIVES), (1, 2), range(PLAYS)):
        for name, case in cases.items():
            if case.tiers == tiers:
                print(f"play {life * PLAYS + number + 1} of {LIVES * PLAYS}: {name}", file=sys.stderr)
                play_once(processes[tiers], case, plays[name])
        if number == PLAYS - 1:
            close(processes[tiers])
    return {name: {each: row(results) for each, results in past.items()} for name, past in plays.items()}


def play_once(processes: dict[str, Process], case: Case, past: dict[str, list[Play]]) -> None:
    """Add a play of `case` to `past`, of each contender that has not failed in it yet."""
    left = {each: process for each, process in processes.items() if not any(one.why for one in past.get(each, ()))}
    play(left, case, BLOCK_SIZE, TURN)
    for each, process in left.items():
        past.setdefault(each, []).append(process.result())


def row(plays: Sequence[Play]) -> dict[str, Any]:
    """Seconds of a request are the least of its plays. What it hits and copies is the same in all of them."""
    why, lie = (next(filter(None, (getattr(each, name) for each in plays)), "") for name in ("why", "lie"))
    if why:
        return {"why": why}
    times = [[request[:TIMES] for request in each.played] for each in plays]
    least = [map(min, zip(*request, strict=True)) for request in zip(*times, strict=True)]
    seconds, cpu, hashes, hash_cpu = zip(*least[int(WARM_UP * len(least)) :], strict=True)
    counts = [request[TIMES:] for request in plays[-1].played]
    hits, tokens, blocks_out, blocks_in = zip(*counts[int(WARM_UP * len(counts)) :], strict=True)
    count = len(seconds)
    return {
        "version": plays[-1].version, "lie": lie, "requests": count,
        "median_us": 1e6 * median(seconds), "mean_us": 1e6 * sum(seconds) / count,
        "p99_us": 1e6 * percentile(seconds, 0.99), "cpu_us": 1e6 * sum(cpu) / count,
        "hash_us": 1e6 * sum(hashes) / count, "hash_cpu_us": 1e6 * sum(hash_cpu) / count,
        "hit_share": sum(hits) / sum(tokens),
        "blocks_out": sum(blocks_out) / count, "blocks_in": sum(blocks_in) / count,
    }  # fmt: skip


def memory(processes: dict[str, Process], files: Files) -> dict[str, dict[str, Any]]:
    """Measured in processes that play nothing else."""
    case = Case(*files.of_trace("memory", files.trace, sized(1_000, 60)), sized(100_000, 10_000))
    told = {name: process.memory(case, BLOCK_SIZE) or {"why": process.why} for name, process in processes.items()}
    close(processes)
    return told


def close(processes: dict[str, Process]) -> None:
    for process in processes.values():
        process.close()


if __name__ == "__main__":
    main()
