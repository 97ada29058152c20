"""Shares of tokens that hit by what clients tell: LRU, untold, last turns told, every return told, and the clairvoyant
bound. The same with wrong and false claims, which may cost no hits.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from _support import begin, generated_trace, made_small, median, sized, trace_name
from rows import tables_of
from tables import markdown

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.replay.clairvoyant import Clairvoyant
from fastdeploy_kvcache_v1.lab.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.told import as_told
from fastdeploy_kvcache_v1.lab.replay.trace import TraceRequest, read_trace
from fastdeploy_kvcache_v1.lab.traffic import KINDS
from tests.lab.replay.test_adaptive_and_lru import stack_traffic

Requests = Sequence[TraceRequest]
Case = dict[str, Any]

TOLD: dict[str, tuple[str, float]] = {
    "untold": ("", 1),
    "unnamed": ("unnamed", 1),
    "last turns": ("last", 1),
    "every return": ("all", 1),
    "wrong by 10": ("all", 10),
    "lies": ("lies", 1),
}
"""Names of `replay --told`, and the error. Untold: the sessions that the trace names, and no more."""

SESSIONS = sized(10_000, 300)
GENERATED = sized(4_000, 100)
KIND_SIZES = sized((1_000, 4_000, 16_000), (1_000,))
CONVERSATION_SIZES = sized((1_000, 2_500, 5_000, 12_500), (100,))


def share(
    requests: Requests, config: KVCacheConfig, told: str = "", error: float = 1.0, *, small: bool = False
) -> float:
    """Share of the input tokens that hit, with one open request. `small`: by a manager that was made small."""
    name = told or ("none" if any(request.session for request in requests) else "unnamed")
    options = ReplayOptions(config, 1, 1, told=name, told_error=error)
    replay = Replay(options)
    if small:
        replay.manager = made_small(config, replay.clock)
    replay.run(as_told(requests, options))
    return (replay.num_device_hit_tokens + replay.num_host_hit_tokens) / replay.num_input_tokens


def case(
    traffic: str,
    requests: Requests,
    device: int,
    host: int = 0,
    *,
    block_size: int = 64,
    told: Iterable[str] = tuple(TOLD),
) -> Case:
    """Shares at one size, over the requests that the device tier can hold."""
    fitting = [request for request in requests if request.input_length <= device * block_size]

    def config(eviction: str) -> KVCacheConfig:
        return KVCacheConfig(device, host, block_size=block_size, eviction_policy=eviction, max_queued_events=0)

    adaptive = config("adaptive")
    shares = {name: share(fitting, adaptive, *TOLD[name]) for name in told}
    bound = Clairvoyant(fitting, block_size).hits(device + host) * block_size
    return {
        "traffic": traffic,
        "device": device,
        "host": host,
        "block_size": block_size,
        "lru": share(fitting, config("lru")),
        "shares": shares,
        "made_small": share(fitting, adaptive, small=True) - shares["untold"] if "lies" in shares else None,
        "bound": bound / sum(request.input_length for request in fitting),
    }


def conversation(options: argparse.Namespace) -> Iterator[Case]:
    """The trace: one tier of large blocks, and two tiers."""
    name, requests = trace_name(options.trace), read_trace(options.trace)
    for device in CONVERSATION_SIZES:
        yield case(name, requests, device, block_size=512)
    yield case(name, requests, *sized((20_000, 80_000), (400, 1_600)), told=("untold",))


def agents(options: argparse.Namespace) -> Iterator[Case]:
    """A trace of agents, if one is given."""
    for path in options.agents or ():
        name, requests = f"agents, {path.name}", read_trace(path)
        for device in (1_000, 2_000):
            yield case(name, requests, device, block_size=512)
        yield case(name, requests, 16_000, 48_000)


def live_blocks(requests: Requests) -> int:
    """Median number of different ids in the newest prompts of sessions that send more requests."""
    last = {request.session: request.line for request in requests}
    newest: dict[str | None, Sequence[int]] = {}
    held: Counter[int] = Counter()
    sizes = []
    for request in requests:
        for each in newest.pop(request.session, ()):
            held[each] -= 1
            if not held[each]:
                del held[each]
        if last[request.session] != request.line:
            newest[request.session] = request.hash_ids
            held.update(request.hash_ids)
        sizes.append(len(held))
    return round(median(sizes))


def sessions(options: argparse.Namespace) -> Iterator[Case]:
    """Generated agent sessions, where memory holds a part of what the live ones need."""
    requests = read_trace(generated_trace("sessions", SESSIONS))
    live = live_blocks(requests)
    for percent in sized((10, 20, 30), (30,)):
        yield case("sessions", requests, live * percent // 100) | {"percent_of_live": percent}


def synthetic(options: argparse.Namespace) -> Iterator[Case]:
    """Every other kind of traffic, and patterns for which recency is best or worst."""
    for kind in sized([each for each in KINDS if each != "sessions"], ["chat"]):
        requests = read_trace(generated_trace(kind, GENERATED))
        for device in KIND_SIZES:
            yield case(kind, requests, device, told=("untold",))
    for num_fit, new in sized(((50, 0.25), (200, 0.1), (200, 0.5)), ((20, 0.1),)):
        prompts = numbered(stack_traffic(num_fit, new, 0.95, GENERATED))
        yield case(f"stack distances, {new:.0%} new", prompts, 2 * num_fit + 1, told=("untold",))
    for size in sized((100, 1_000), (100,)):
        prompts = numbered(number % (size // 2 + 1) for number in range(GENERATED))
        yield case("loop one prompt larger than the tier", prompts, size + 1, told=("untold",))
    for exponent in (0.7, 1.0):
        dice, weights = random.Random(7), list(accumulate((place + 1) ** -exponent for place in range(2_000)))
        prompts = numbered(dice.choices(range(2_000), cum_weights=weights, k=GENERATED))
        yield case(f"Zipf {exponent:g}", prompts, 400, told=("untold",))


def numbered(prompts: Iterable[int]) -> Requests:
    """Prompts of two blocks by number, one a second."""
    return [
        TraceRequest(
            line=line,
            timestamp_ms=1000 * line,
            input_length=2 * 64 + 1,
            output_length=1,
            hash_ids=(2 * number, 2 * number + 1),
            tokens_per_id=64,
        )
        for line, number in enumerate(prompts)
    ]


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Case]]] = {
    each.__name__: each for each in (conversation, agents, sessions, synthetic)
}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--agents", type=Path, nargs="+", metavar="FILE", help="traces of agents")
    parser.add_argument("--only", choices=PARTS, metavar="PART", help=f"one of {', '.join(PARTS)}")


def main() -> None:
    run = begin(trace=True, configure=configure)
    only = run.options.only
    measured = {
        "trace": trace_name(run.options.trace),
        "cases": [each for name, part in PARTS.items() if only in (None, name) for each in part(run.options)],
    }
    run.save(measured)
    for table in tables_of("hits", measured):
        print(f"\n{table.title}\n{markdown(table)}")


if __name__ == "__main__":
    main()
