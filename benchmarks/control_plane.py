"""Time per request of the CacheManager beside the least that a prefix cache can do (`naive.py`), with hashes given.
A request is match, allocate, commit and finish; all contenders play the same requests in turns of 250.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from _support import begin, made_small, median, percentile, sized, trace_name
from naive import NaiveCache

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import BlockHash, NoSpace
from fastdeploy_kvcache_v1.lab.replay.hashes import TraceHasher
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes

BLOCK_SIZE = KVCacheConfig.block_size
TURN = 250
DEVICE_BLOCKS = sized(20_000, 2_000)
HOST_BLOCKS = 4 * DEVICE_BLOCKS
WINDOW_BLOCKS = sized(40_000, 20_000)
SIZES = sized((5_000, 20_000, 40_000, 1_000_000), (2_000, 4_000))
WINDOWS = sized((1, 32, 128), (1, 4, 8))


class Request(NamedTuple):
    number: int
    hashes: list[BlockHash]
    num_tokens: int
    arrival: float
    """Seconds since the trace began."""


class Naive:
    def __init__(self, num_blocks: int, window: int = 1) -> None:
        self.cache = NaiveCache(num_blocks)
        self.window = window
        self.open: deque[int] = deque()
        self.seconds: list[float] = []

    def play(self, request: Request) -> None:
        begin = perf_counter()
        if len(self.open) == self.window:
            self.cache.finish(self.open.popleft())
        self.cache.start(request.number, request.hashes, request.num_tokens, BLOCK_SIZE)
        self.cache.commit(request.number)
        self.seconds.append(perf_counter() - begin)
        self.open.append(request.number)


class Managed:
    """`seconds` is match + allocate + commit + finish; `step_seconds` is the `take_swap_step` in between.
    The manager's time is the trace's.
    """

    clock = staticmethod(perf_counter)

    def __init__(
        self,
        num_device: int,
        num_host: int = 0,
        window: int = 1,
        policy: str = "write_back",
        eviction: str = KVCacheConfig.eviction_policy,
    ) -> None:
        self.now = 0.0
        self.manager = made_small(
            KVCacheConfig(
                num_device,
                num_host,
                block_size=BLOCK_SIZE,
                write_policy=WritePolicy(policy),
                eviction_policy=eviction,
                max_queued_events=0,
            ),
            lambda: self.now,
        )
        self.window = window
        self.open: deque[str] = deque()
        self.seconds: list[float] = []
        self.step_seconds: list[float] = []

    def play(self, request: Request) -> None:
        manager, request_id = self.manager, str(request.number)
        sequence = GivenHashes(request.hashes, request.num_tokens)
        clock, self.now = self.clock, request.arrival
        begin = clock()
        if len(self.open) == self.window:
            manager.finish(self.open.popleft())
        manager.match_prefix(request_id, sequence)
        allocation = manager.allocate(request_id, request.num_tokens)
        allocated = clock()
        assert not isinstance(allocation, NoSpace), "the device tier must hold the window"
        manager.take_swap_step()
        sequence.num_tokens += 1  # the first sampled token
        computed = clock()
        manager.commit(request_id, request.num_tokens)
        self.seconds.append(allocated - begin + clock() - computed)
        self.step_seconds.append(computed - allocated)
        self.open.append(request_id)


def load(trace: Path) -> list[Request]:
    hasher = TraceHasher(BLOCK_SIZE)
    requests = read_trace(trace)
    return [
        Request(number, hasher.prompt_hashes(one), one.input_length, one.timestamp_ms / 1000)
        for number, one in enumerate(requests)
    ]


def play_in_turns(requests: list[Request], contenders: Mapping[str, Naive | Managed]) -> None:
    for first in range(0, len(requests), TURN):
        for contender in contenders.values():
            for request in requests[first : first + TURN]:
                contender.play(request)


def against_naive(requests: list[Request]) -> dict[str, object]:
    contenders: dict[str, Naive | Managed] = {"naive": Naive(DEVICE_BLOCKS), "one tier": Managed(DEVICE_BLOCKS)}
    for policy in WritePolicy:
        contenders[f"two tiers, {policy.value}"] = Managed(DEVICE_BLOCKS, HOST_BLOCKS, policy=policy.value)
    play_in_turns(requests, contenders)
    base = median(contenders["naive"].seconds)
    rows = {}
    for name, contender in contenders.items():
        row = {
            "median_us": 1e6 * median(contender.seconds),
            "p99_us": 1e6 * percentile(contender.seconds, 0.99),
            "p99_over_median": percentile(contender.seconds, 0.99) / median(contender.seconds),
            "ratio_to_naive": median(contender.seconds) / base,
        }
        if isinstance(contender, Managed):
            counters = contender.manager.stats().counters
            row["step_median_us"] = 1e6 * median(contender.step_seconds)
            row["evictions_per_request"] = counters.device_evicted_blocks / len(requests)
            row["hit_share"] = (counters.device_hit_tokens + counters.host_hit_tokens) / counters.query_tokens
            contender.manager.check()
        rows[name] = row
    return rows


def over_sizes(requests: list[Request]) -> dict[str, object]:
    """Medians over the last third of the trace, when the largest cache is full as well."""
    make: dict[str, Callable[[int], Naive | Managed]] = {"naive": Naive, "one tier": Managed}
    contenders = {f"{name} {size}": factory(size) for size in SIZES for name, factory in make.items()}
    play_in_turns(requests, contenders)
    measured = len(requests) // 3
    rows: dict[str, object] = {}
    for name in make:
        medians = {str(size): 1e6 * median(contenders[f"{name} {size}"].seconds[-measured:]) for size in SIZES}
        rows[name] = {"median_us": medians, "growth": medians[str(SIZES[-1])] / medians[str(SIZES[0])]}
    return rows


def over_windows(requests: list[Request]) -> dict[str, object]:
    contenders: dict[str, Naive | Managed] = {}
    for window in WINDOWS:
        contenders[f"naive {window}"] = Naive(WINDOW_BLOCKS, window)
        contenders[f"one tier {window}"] = Managed(WINDOW_BLOCKS, window=window)
        contenders[f"two tiers {window}"] = Managed(WINDOW_BLOCKS, HOST_BLOCKS, window=window)
    play_in_turns(requests, contenders)
    return {name: {"median_us": 1e6 * median(contender.seconds)} for name, contender in contenders.items()}


MEMORY_PROGRAM = """
import gc, json, sys, tracemalloc
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.replay.hashes import TraceHasher
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
sys.path.insert(0, sys.argv[1])
from _support import made_small
trace, device, host = sys.argv[2], *map(int, sys.argv[3:])
hasher = TraceHasher(64)
requests = [(r.line, r) for r in read_trace(trace, 4000)]
for _, r in requests: hasher.prompt_hashes(r)
tracemalloc.start()
before = tracemalloc.get_traced_memory()[0]
manager = made_small(KVCacheConfig(device, host, write_policy="write_back", max_queued_events=0))
for line, r in requests:
    sequence = GivenHashes(hasher.prompt_hashes(r), r.input_length)
    manager.match_prefix(str(line), sequence)
    manager.allocate(str(line), r.input_length)
    manager.take_swap_step()
    sequence.num_tokens += 1
    manager.commit(str(line), r.input_length)
    manager.finish(str(line))
del sequence
gc.collect()
used = tracemalloc.get_traced_memory()[0] - before
stats = manager.stats()
print(json.dumps({"cached_blocks": stats.device_cached_blocks + stats.host_cached_blocks, "bytes": used}))
"""


def memory(trace: Path) -> dict[str, object]:
    """Bytes that a full manager holds, its hashes included, per cached block (tracemalloc)."""
    rows = {}
    for name, device, host in (("one tier", 2 * DEVICE_BLOCKS, 0), ("two tiers", DEVICE_BLOCKS, HOST_BLOCKS)):
        given = [str(each) for each in (Path(__file__).parent, trace, device, host)]
        command = [sys.executable, "-c", MEMORY_PROGRAM, *given]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        rows[name] = {**row, "device_blocks": device, "bytes_per_block": row["bytes"] / row["cached_blocks"]}
    return rows


def main() -> None:
    run = begin(trace=True)
    requests = load(run.options.trace)
    gc.collect()
    gc.freeze()  # so that no collection walks the trace
    blocks = sum(len(request.hashes) for request in requests) / len(requests)
    run.save(
        {
            "trace": trace_name(run.options.trace),
            "requests": len(requests),
            "blocks_per_request": blocks,
            "device_blocks": DEVICE_BLOCKS,
            "host_blocks": HOST_BLOCKS,
            "window_blocks": WINDOW_BLOCKS,
            "against_naive": against_naive(requests),
            "over_sizes": over_sizes(requests),
            "over_windows": over_windows(requests),
            "memory": memory(run.options.trace),
        },
    )


if __name__ == "__main__":
    main()
