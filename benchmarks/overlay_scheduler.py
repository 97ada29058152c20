"""Cost of FastDeploy's scheduler with our adapter and with its own cache manager: same requests, same steps, one run.

    FASTDEPLOY_25=DIR FASTDEPLOY_26=DIR python benchmarks/overlay_scheduler.py

One request at a time goes through the real ResourceManagerV1: add, schedule (match, allocate, insert), one token,
schedule, finish. The device cache is full from the start, so every new prompt evicts; every second request repeats an
earlier prompt. The two managers take turns, request by request, so that both see the same machine. No worker runs.

Two costs per request: `cache` is the time inside the cache manager (ours with all that the overlay adds to a step),
`step` is all of `schedule` and `finish_requests`, with what the host does in both cases. Measured twice: as the host is
configured, where its own manager writes log lines, and with all logging off.
"""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from _support import ROOT, median, percentile, save

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.patches import put_tasks
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import checkout_variable, known_releases

SIZES = (1_000, 100_000)
BLOCK_SIZE = KVCacheConfig.block_size
PROMPT_BLOCKS = 32
REQUESTS = 120


def main() -> None:
    results: dict[str, Any] = {}
    for release in known_releases():
        variable = checkout_variable(release)
        if tree := os.environ.get(variable):
            results[release] = run_inside(Path(tree).resolve())
        else:
            print(f"{variable} is not set: FastDeploy {release} is left out", file=sys.stderr)
    if not results:
        sys.exit("error: no FastDeploy tree: set FASTDEPLOY_25 or FASTDEPLOY_26")
    save("overlay_scheduler", {"prompt_blocks": PROMPT_BLOCKS, "requests": REQUESTS, "releases": results})


def run_inside(tree: Path) -> Any:
    """Measure in a process that has the tree on its path."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT), str(ROOT / "benchmarks")]),
        "ENABLE_V1_KVCACHE_MANAGER": "1",
        "ENABLE_V1_KVCACHE_SCHEDULER": "1",
        "FD_LOG_DIR": os.environ.get("FD_LOG_DIR", "/tmp/overlay_scheduler_log"),
    }
    done = subprocess.run(
        [sys.executable, __file__, "inside"], env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"sizes"')))


class Timed:
    """A cache manager whose calls from outside are timed. Calls it makes to itself are part of them."""

    def __init__(self, target: Any, clock: list[float]) -> None:
        self._target, self._clock = target, clock

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name in ("publisher", "transit"):
            value = Timed(value, self._clock)
        if callable(value) and not isinstance(value, Timed):
            value = self._timed(value)
        if callable(value) or isinstance(value, Timed):
            vars(self)[name] = value  # found at once the next time; plain attributes change
        return value

    def _timed(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self._clock[0] += time.perf_counter() - start

        return call


class Contender:
    """ResourceManagerV1 with one of the two cache managers."""

    def __init__(self, blocks: int, *, ours: bool) -> None:
        from fastdeploy.cache_manager.prefix_cache_manager import PrefixCacheManager
        from fastdeploy.engine.sched.resource_manager_v1 import ResourceManagerV1

        from tests.fastdeploy.drive_resource_manager import make_manager, make_request

        self.make_request = make_request
        self.manager = make_manager(
            blocks, 0, "write_through", block_size=BLOCK_SIZE, seats=8, max_tokens=BLOCK_SIZE * PROMPT_BLOCKS * 2
        )
        self.schedule = self.manager.schedule
        if not ours:
            self.manager.cache_manager = PrefixCacheManager(self.manager.config, 1, "mixed", 0)
            original = ResourceManagerV1.schedule.__wrapped__
            self.schedule = lambda: original(self.manager)
        self.clock = [0.0]
        self.put = self._timed_put if ours else lambda tasks: None
        self.manager.cache_manager = Timed(self.manager.cache_manager, self.clock)

    def _timed_put(self, tasks: Any) -> None:
        """What the overlay adds to `put_tasks`: blocks become matchable."""
        start = time.perf_counter()
        if tasks:
            put_tasks(lambda message: None, None, ((tasks, len(tasks)),), {})
        self.clock[0] += time.perf_counter() - start

    def serve(self, request_id: str, prompt: list[int]) -> tuple[float, float, int]:
        """Returns the seconds spent in its steps, those of them in the cache manager, and its cached tokens."""
        request = self.make_request(request_id, prompt)
        self.manager.add_request(request)
        for future in request.async_process_futures:
            future.result()  # the host skips a request whose preprocessing is not done; not what is measured here
        self.clock[0] = 0.0
        start = time.perf_counter()
        tasks, _ = self.schedule()
        self.put(tasks)
        seconds = time.perf_counter() - start
        assert [task.request_id for task in tasks] == [request_id], "the request was not scheduled"
        request.output_token_ids.append(1)
        start = time.perf_counter()
        self.put(self.schedule()[0])
        self.manager.cache_output_tokens(request)
        self.manager.finish_requests([request_id])
        return seconds + time.perf_counter() - start, self.clock[0], request.num_cached_tokens


def prompts(blocks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that fill the cache, and prompts to measure with: new ones and repeated ones in turn."""
    rng = random.Random(1)

    def new() -> list[int]:
        return [rng.randrange(1, 100_000) for _ in range(BLOCK_SIZE * PROMPT_BLOCKS)]

    filling = [new() for _ in range(blocks // PROMPT_BLOCKS)]
    recent = filling[-max(4, len(filling) // 2) :]
    return filling, [new() if number % 2 else rng.choice(recent) for number in range(REQUESTS)]


def measure(blocks: int, *, logs: bool) -> dict[str, Any]:
    logging.disable(logging.NOTSET if logs else logging.CRITICAL)
    contenders = {"ours": Contender(blocks, ours=True), "host": Contender(blocks, ours=False)}
    filling, measured = prompts(blocks)
    for number, prompt in enumerate(filling):
        for contender in contenders.values():
            contender.serve(f"f{number}", prompt)
    costs: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in contenders} for kind in ("cache", "step")}
    cached = dict.fromkeys(contenders, 0)
    for number, prompt in enumerate(measured):
        for name, contender in contenders.items():
            step, cache, hit = contender.serve(f"m{number}", prompt)
            costs["step"][name].append(step)
            costs["cache"][name].append(cache)
            cached[name] += hit
    result: dict[str, Any] = {"blocks": blocks, "host_logs": logs, "cached_tokens": cached}
    for kind, values in costs.items():
        result[kind] = {
            **{f"{name}_us": spread(values[name]) for name in contenders},
            "ratio_of_medians": median(values["ours"]) / median(values["host"]),
            "ratio_of_means": sum(values["ours"]) / sum(values["host"]),
        }
    return result


def spread(seconds: list[float]) -> dict[str, float]:
    return {
        "median": median(seconds) * 1e6,
        "p99": percentile(seconds, 0.99) * 1e6,
        "mean": 1e6 * sum(seconds) / len(seconds),
    }


if __name__ == "__main__":
    if sys.argv[1:] == ["inside"]:
        print(json.dumps({"sizes": [measure(blocks, logs=logs) for blocks in SIZES for logs in (True, False)]}))
    else:
        main()
