"""Time per request of FastDeploy's real `ResourceManagerV1` with this plugin over that with its own cache manager.
Prompts of 32 blocks evict in a full cache, every second one repeats an earlier prompt; each manager has a process.

One request at a time is added, scheduled, given one token, scheduled and finished; the managers take turns. `cache` is
the time inside the cache manager, and of the plugin whatever the overlay adds. `step` is all of `schedule` and
`finish_requests`. Both are measured as the host is configured, and with all logging off. No worker runs.
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

from _support import ROOT, begin, median, percentile, sized

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.patches import put_tasks
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import checkout_variable, known_releases

SIZES = sized((1_000, 40_000), (1_000,))
BLOCK_SIZE = KVCacheConfig.block_size
PROMPT_BLOCKS = 32
REQUESTS, TURN = sized((240, 24), (4, 2))
LEAST_HITS = 0.9
"""Of the tokens that the other manager hits: one of them computes a prompt's last block again, the other a token."""
INSIDE, ANSWER = "inside", "served "


def main() -> None:
    run = begin(variables=map(checkout_variable, known_releases()))
    results: dict[str, Any] = {}
    for release in known_releases():
        variable = checkout_variable(release)
        if tree := os.environ.get(variable):
            root = Path(tree).resolve()
            results[release] = {"sizes": [measure(root, size, logs) for size in SIZES for logs in (1, 0)]}
        else:
            print(f"{variable} is not set: FastDeploy {release} is left out", file=sys.stderr)
    if not results:
        sys.exit("error: no FastDeploy tree: set one of these variables to a checkout")
    run.save({"prompt_blocks": PROMPT_BLOCKS, "requests": REQUESTS, "releases": results})


class Process:
    """FastDeploy in a process of its own, with the plugin's manager (`ours`) or its own."""

    def __init__(self, tree: Path, blocks: int, logs: int, *, ours: bool) -> None:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(tree), str(ROOT), str(ROOT / "benchmarks")]),
            "ENABLE_V1_KVCACHE_MANAGER": str(int(ours)),
            "ENABLE_V1_KVCACHE_SCHEDULER": "1",
            "FD_LOG_DIR": os.environ.get("FD_LOG_DIR", f"/tmp/overlay_scheduler_log/{'ours' if ours else 'host'}"),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, INSIDE, str(blocks), str(logs), str(int(ours))],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def take_turn(self) -> list[dict[str, Any]]:
        """Fill the cache in the first turn, and serve `TURN` requests in each further one."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("next\n")
        self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(ANSWER):
                return list(json.loads(line.removeprefix(ANSWER)))
        sys.exit(f"error: a scheduler ended with code {self._process.wait()}; see what it printed above")

    def close(self) -> None:
        self._process.communicate(timeout=60)


def measure(tree: Path, blocks: int, logs: int) -> dict[str, Any]:
    processes = {name: Process(tree, blocks, logs, ours=name == "ours") for name in ("ours", "host")}
    costs: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in processes} for kind in ("cache", "step")}
    cached = dict.fromkeys(processes, 0)
    for process in processes.values():
        process.take_turn()
    for _ in range(REQUESTS // TURN):
        for name, process in processes.items():
            turn = process.take_turn()
            for kind in costs:
                costs[kind][name] += [served[kind] for served in turn]
            cached[name] += sum(served["cached"] for served in turn)
    for process in processes.values():
        process.close()
    if not LEAST_HITS * cached["host"] <= cached["ours"] <= cached["host"] / LEAST_HITS:
        sys.exit(f"error: the managers do not hit the same tokens: {cached}")
    result: dict[str, Any] = {"blocks": blocks, "host_logs": bool(logs), "cached_tokens": cached}
    for kind, values in costs.items():
        result[kind] = {
            **{f"{name}_us": spread(values[name]) for name in processes},
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


# ---- inside a process of FastDeploy


def answer_requests(blocks: int, logs: int, ours: int) -> None:
    logging.disable(logging.NOTSET if logs else logging.CRITICAL)
    contender = Contender(blocks, ours=bool(ours))
    filling, measured = prompts(blocks)
    for number, prompt in enumerate(filling):
        contender.serve(f"f{number}", prompt)
    sys.stdin.readline()
    print(ANSWER + "[]", flush=True)
    for start in range(0, REQUESTS, TURN):
        sys.stdin.readline()
        served = [contender.serve(f"m{number}", measured[number]) for number in range(start, start + TURN)]
        print(ANSWER + json.dumps(served), flush=True)


class Clock:
    """Adds up the time of calls. A call inside another one counts once."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._is_inside = False

    def timed(self, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - start
                self._is_inside = False

        return call


class Timed:
    """A cache manager whose calls are timed. `isinstance` takes it for its target: the plugin asks."""

    def __init__(self, target: Any, clock: Clock) -> None:
        vars(self).update(_target=target, _clock=clock)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self._target)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._target, name)
        if name in ("publisher", "transit"):
            value = Timed(value, self._clock)
        elif callable(value):
            value = self._clock.timed(value)
        else:
            return value
        vars(self)[name] = value  # methods are looked up once; plain attributes change
        return value


class Contender:
    """`ResourceManagerV1` with the cache manager of this process."""

    def __init__(self, blocks: int, *, ours: bool) -> None:
        from tests.fastdeploy.real_manager import make_manager, make_request

        self.make_request = make_request
        self.manager = make_manager(
            blocks, 0, "write_through", block_size=BLOCK_SIZE, seats=8, max_tokens=BLOCK_SIZE * PROMPT_BLOCKS * 2
        )
        self.schedule = self.manager.schedule
        self.clock = Clock()
        self.put = self.clock.timed(_put) if ours else lambda tasks: None
        self.manager.cache_manager = Timed(self.manager.cache_manager, self.clock)

    def serve(self, request_id: str, prompt: list[int]) -> dict[str, float]:
        """Serve one request. Returns its seconds in steps and in the cache manager, and its cached tokens."""
        request = self.make_request(request_id, prompt)
        self.manager.add_request(request)
        for future in request.async_process_futures:
            future.result()  # the host skips a request whose preprocessing is not done
        self.clock.seconds = 0.0
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
        seconds += time.perf_counter() - start
        return {"step": seconds, "cache": self.clock.seconds, "cached": request.num_cached_tokens}


def _put(tasks: Any) -> None:
    """Do the overlay's part of `put_tasks`, which makes blocks matchable."""
    if tasks:
        put_tasks(lambda message: None, None, ((tasks, len(tasks)),), {})


def prompts(blocks: int) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts that fill the cache, and measured prompts: repeated and new ones in turn."""
    rng = random.Random(1)

    def new() -> list[int]:
        return [rng.randrange(1, 100_000) for _ in range(BLOCK_SIZE * PROMPT_BLOCKS)]

    filling = [new() for _ in range(blocks // PROMPT_BLOCKS)]
    recent = filling[-max(4, len(filling) // 2) :]
    return filling, [new() if number % 2 else rng.choice(recent) for number in range(REQUESTS)]


if __name__ == "__main__":
    if sys.argv[1:2] == [INSIDE]:
        answer_requests(*map(int, sys.argv[2:]))
    else:
        main()
