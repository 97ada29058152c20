"""CPU time per request under `adaptive` eviction over that under `lru`, on a trace and on all generated traffic.
Both play the same requests in turns of 250; "with the step" adds the `take_swap_step` that learns of an arrival.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Iterator
from pathlib import Path
from time import thread_time

from _support import begin, generated_trace, median, sized, trace_name
from control_plane import Managed, Request, load, play_in_turns

from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.lab.traffic import KINDS

GENERATED = sized(4_000, 100)
TRAFFIC = sized(tuple(KINDS), ("chat",))
POLICIES = ("lru", "adaptive")
TRACE_SIZES = sized(((5_000, 0, 1), (20_000, 0, 1), (40_000, 0, 32), (20_000, 80_000, 1)), ((4_000, 0, 1),))
GENERATED_SIZES = ((4_000, 0, 1), (8_000, 0, 32))
"""Device blocks, host blocks, open requests."""


class Contender(Managed):
    """A manager that gets new hash objects with each prompt, as in a server. Its clock is CPU time."""

    clock = staticmethod(thread_time)

    def play(self, request: Request) -> None:
        super().play(request._replace(hashes=[BlockHash(bytes(bytearray(block))) for block in request.hashes]))


def traffic(trace: Path) -> Iterator[tuple[str, list[Request], tuple[tuple[int, int, int], ...]]]:
    yield trace_name(trace), load(trace), TRACE_SIZES
    for kind in TRAFFIC:
        yield kind, load(generated_trace(kind, GENERATED)), GENERATED_SIZES


def compare(requests: list[Request], device: int, host: int, window: int) -> dict[str, dict[str, float]]:
    playable = [request for request in requests if len(request.hashes) < device // window]
    contenders = {name: Contender(device, host, window, "auto", name) for name in POLICIES}
    play_in_turns(playable, contenders)
    with_step = {name: list(map(operator.add, each.seconds, each.step_seconds)) for name, each in contenders.items()}
    base = contenders["lru"]
    rows = {}
    for name, contender in contenders.items():
        counters = contender.manager.stats().counters
        rows[name] = {
            "median_us": 1e6 * median(contender.seconds),
            "ratio": median(contender.seconds) / median(base.seconds),
            "ratio_of_means": sum(contender.seconds) / sum(base.seconds),
            "ratio_with_step": median(with_step[name]) / median(with_step["lru"]),
            "hit_tokens": counters.device_hit_tokens + counters.host_hit_tokens,
        }
    return rows


def main() -> None:
    run = begin(trace=True)
    cases = []
    for name, requests, sizes in traffic(run.options.trace):
        gc.collect()
        gc.freeze()  # so that no collection walks the trace
        for device, host, window in sizes:
            rows = compare(requests, device, host, window)
            cases.append({"traffic": name, "device": device, "host": host, "window": window, "policies": rows})
    run.save({"trace": trace_name(run.options.trace), "cases": cases})


if __name__ == "__main__":
    main()
