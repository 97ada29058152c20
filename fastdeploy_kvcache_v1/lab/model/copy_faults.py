"""Test hook that makes the worker's copies slow or failing, by `FASTDEPLOY_KVCACHE_COPY_FAULTS` of the server:

    {"seed": 1, "max_delay_ms": 5, "delay_ms": {"swap_in": 20}, "fail": {"swap_in": [0, 9], "swap_out": "all"}}

Each copy first sleeps a random time, and the time of its stream. The named calls on a stream, from 0, fail. Swap-in has
a call per layer. `"ranks": [1]` limits it to these tensor-parallel ranks.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from typing import Any

from ...errors import ConfigError
from ...worker.runtime import CpuRuntime

VARIABLE = "FASTDEPLOY_KVCACHE_COPY_FAULTS"


class InjectedCopyError(RuntimeError):
    """An injected failure of a copy."""


class CopyFaults:
    """A `CpuRuntime` delay hook. Each stream has a thread, a counter and random numbers of its own."""

    def __init__(
        self,
        *,
        seed: int = 0,
        max_delay_ms: float = 0.0,
        delay_ms: dict[str, float] | None = None,
        fail: dict[str, Any] | None = None,
    ) -> None:
        self._max_delay_s = max_delay_ms / 1000
        self._delay_ms = delay_ms or {}
        self._fail = fail or {}
        self._random = random.Random(seed)
        self._calls: Counter[str] = Counter()

    def __call__(self, stream_name: str) -> None:
        stream = next((name for name in ("swap_in", "swap_out") if name in stream_name), stream_name)
        call = self._calls[stream]
        self._calls[stream] += 1
        if self._max_delay_s:
            time.sleep(self._random.uniform(0.0, self._max_delay_s))
        time.sleep(self._delay_ms.get(stream, 0.0) / 1000)
        failing = self._fail.get(stream, ())
        if failing == "all" or call in failing:
            raise InjectedCopyError(f"injected failure of call {call} on stream {stream}")


def make_runtime(faults: str, rank: int = 0) -> CpuRuntime:
    """A CPU runtime with the faults described in JSON, or a plain one for ''. Raises `ConfigError`."""
    if not faults:
        return CpuRuntime()
    try:
        options = json.loads(faults)
        ranks = options.pop("ranks", [rank])
        delay = CopyFaults(**options)
        return CpuRuntime(delay=delay) if rank in ranks else CpuRuntime()
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{VARIABLE} is not a valid description of copy faults: {error}") from None
