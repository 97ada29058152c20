"""`replay --compare`: each policy at each size on one trace, beside one LRU tier and the clairvoyant bound."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from tqdm import tqdm

from ...config import WritePolicy
from ...errors import ConfigError
from ...scheduler.policies.eviction import EVICTION_POLICIES
from .clairvoyant import Clairvoyant
from .driver import ReplayOptions
from .report import play
from .trace import TraceRequest


class Capacity(NamedTuple):
    """Blocks of the two tiers."""

    device: int
    host: int


def policies(names: str | None) -> tuple[list[WritePolicy], list[str]]:
    """Write policies and eviction policies in a list with commas; all policies of a kind that it does not name.

    Raises `ConfigError` with the choices.
    """
    wanted = [name.strip() for name in names.split(",")] if names is not None else []
    known = [*WritePolicy, *EVICTION_POLICIES]
    for name in wanted:
        if name not in known:
            raise ConfigError(f"--policies: unknown policy {name!r}: choose from {', '.join(known)}")
    write = [policy for policy in WritePolicy if policy in wanted]
    eviction = [name for name in EVICTION_POLICIES if name in wanted]
    return write or list(WritePolicy), eviction or list(EVICTION_POLICIES)


class Comparison:
    """Plays a trace at each capacity under each pair of policies. Not thread-safe."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        options: ReplayOptions,
        write: list[WritePolicy],
        eviction: list[str],
        told: Sequence[str],
    ) -> None:
        """`options` without sizes and policies; `write` and `eviction` policies to play, for each name of `told`."""
        self._requests = requests
        self._options = options
        self._write, self._eviction = write, eviction
        self._options_told = [replace(options, told=name) for name in told]
        self._clairvoyants: dict[int, Clairvoyant] = {}
        """By the number of played requests."""

    def run(self, capacities: Sequence[Capacity]) -> dict[str, Any]:
        """JSON-ready: the bounds of each capacity, and the `report.summary` of each run. Raises like the runs."""
        total = sum(self._num_runs(each) + 1 for each in capacities)
        with tqdm(total=total, unit="run", disable=None, leave=False) as bar:
            return {"capacities": [self._at(capacity, bar) for capacity in capacities]}

    def most_runs(self, capacities: Sequence[Capacity]) -> int:
        """Runs at one capacity."""
        return max(map(self._num_runs, capacities))

    def _num_runs(self, capacity: Capacity) -> int:
        return len(list(self._variants(capacity)))

    def _at(self, capacity: Capacity, bar: tqdm[Any]) -> dict[str, Any]:
        """Results at one capacity. The one large tier refuses the same requests as the device tier."""
        room = capacity.device * self._options.config.block_size
        playable = [request for request in self._requests if request.input_length <= room]

        def played(options: ReplayOptions, device: int, host: int, write: WritePolicy, eviction: str) -> dict[str, Any]:
            config = replace(options.config, num_device_blocks=device, num_host_blocks=host)
            config = replace(config, write_policy=write, eviction_policy=eviction)
            result = play(replace(options, config=config), self._requests)
            bar.update()
            return result

        refusing = replace(self._options, max_input_tokens=room)
        one_tier = played(refusing, sum(capacity), 0, self._options.config.write_policy, "lru")
        return {
            "device_blocks": capacity.device,
            "host_blocks": capacity.host,
            "requests": len(playable),
            "requests_too_long": len(self._requests) - len(playable),
            "clairvoyant": self._bound(capacity, playable),
            "one_lru_tier": one_tier["hit_rate"]["total"],
            "runs": [played(options, *capacity, *pair) for options, pair in self._variants(capacity)],
        }

    def _variants(self, capacity: Capacity) -> Iterator[tuple[ReplayOptions, tuple[WritePolicy, str]]]:
        """Pairs of policies, and what they are told. Without a host tier write policies have no effect, and `lru`
        heeds no hint.
        """
        write = self._write if capacity.host else [self._options.config.write_policy]
        for pair in itertools.product(write, self._eviction):
            for options in self._options_told[: 1 if "lru" in pair else None]:
                yield options, pair

    def _bound(self, capacity: Capacity, requests: Sequence[TraceRequest]) -> float | None:
        """Share of the input tokens. None in a closed loop, whose order of requests is open."""
        if self._options.closed_loop:
            return None
        block_size = self._options.config.block_size
        if len(requests) not in self._clairvoyants:  # smaller device tiers play fewer requests of the same trace
            self._clairvoyants[len(requests)] = Clairvoyant(requests, block_size, outputs=self._options.outputs)
        num_tokens = sum(request.input_length for request in requests)
        return self._clairvoyants[len(requests)].hits(sum(capacity)) * block_size / max(1, num_tokens)


NAMES = ("write policy", "eviction", "told")
COLUMNS = (*NAMES, "hit rate", "device", "host", "blocks out", "per host hit", "p50 us", "p99 us")


def comparison_table(result: dict[str, Any]) -> str:
    """A table per capacity, for people."""
    return "\n\n".join(_section(each) for each in result["capacities"])


def _section(at: dict[str, Any]) -> str:
    rows = [COLUMNS, *(_row(run) for run in at["runs"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    bound = "" if at["clairvoyant"] is None else f", a clairvoyant one {at['clairvoyant']:.1%} (copies not counted)"
    refused = f", {at['requests_too_long']:,} longer than the device tier" if at["requests_too_long"] else ""
    lines = [
        f"{at['device_blocks']:,} device + {at['host_blocks']:,} host blocks, {at['requests']:,} requests{refused}",
        f"one LRU tier of both together hits {at['one_lru_tier']:.1%}{bound}",
    ]
    for row in rows:
        cells = [f"{cell:{'<' if column < len(NAMES) else '>'}{widths[column]}}" for column, cell in enumerate(row)]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(run: dict[str, Any]) -> tuple[str, ...]:
    options, hit, per_hit = run["options"], run["hit_rate"], run["swapped_out_per_host_hit"]
    return (
        options["write_policy"] if options["host_blocks"] else "-",
        options["eviction_policy"],
        options["told"],
        *(f"{hit[name]:.1%}" for name in ("total", "device", "host")),
        f"{run['blocks_swapped_out']:,}",
        "-" if per_hit is None else f"{per_hit:.1f}",
        *(f"{run['request_us'][name]:.0f}" for name in ("p50", "p99")),
    )
