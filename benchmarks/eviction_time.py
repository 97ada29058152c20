"""Time per request under the adaptive order, over that under LRU: `eviction_time.py [TRACE]`.

On a real trace and on every kind of generated traffic, one request at a time and 32 at once. Both policies play the
same requests in the same run, in turns of a few hundred. The time is the processor's for all calls of a request; with
the step, one `take_swap_step` is added, in which a request's arrival is learned. Ratios are of medians.
"""

from __future__ import annotations

import gc
import json
import operator
import tempfile
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from time import thread_time

from _support import median, need_trace, save
from control_plane import Managed, Request, load, play_in_turns

from fastdeploy_kvcache_v1.contract.messages import BlockHash
from fastdeploy_kvcache_v1.lab.traffic import KINDS, Source

GENERATED = 4_000
SEED = 7
POLICIES = ("lru", "adaptive")
REAL_SIZES = ((5_000, 0, 1), (20_000, 0, 1), (60_000, 0, 32), (20_000, 80_000, 1))
"""Device blocks, host blocks, open requests."""
GENERATED_SIZES = ((4_000, 0, 1), (8_000, 0, 32))


class Contender(Managed):
    """Plays prompts whose names are new objects, as in a server, which has just hashed the tokens. Time is that of the
    processor, so it is not counted when others use it.
    """

    clock = staticmethod(thread_time)

    def play(self, request: Request) -> None:
        super().play(request._replace(hashes=[BlockHash(bytes(bytearray(block))) for block in request.hashes]))


def generated(kind: str, folder: Path) -> list[Request]:
    trace = folder / f"{kind}.jsonl"
    lines = KINDS[kind].lines(Source(SEED), KINDS[kind].shape)
    trace.write_text("".join(json.dumps(line) + "\n" for line in islice(lines, GENERATED)), encoding="utf-8")
    return load(trace)


def traffic() -> Iterator[tuple[str, list[Request], tuple[tuple[int, int, int], ...]]]:
    yield "conversations", load(need_trace()), REAL_SIZES
    with tempfile.TemporaryDirectory() as folder:
        for kind in KINDS:
            yield kind, generated(kind, Path(folder)), GENERATED_SIZES


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
            "ratio_with_step": median(with_step[name]) / median(with_step["lru"]),
            "hit_tokens": counters.device_hit_tokens + counters.host_hit_tokens,
        }
    return rows


def main() -> None:
    cases = []
    for name, requests, sizes in traffic():
        gc.collect()
        gc.freeze()  # the trace itself shall not be walked by every collection
        for device, host, window in sizes:
            rows = compare(requests, device, host, window)
            cases.append({"traffic": name, "device": device, "host": host, "window": window, "policies": rows})
    save("eviction_time", {"cases": cases})


if __name__ == "__main__":
    main()
