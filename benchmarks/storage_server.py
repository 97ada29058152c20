"""Time to the first token of prompts that another server stored, over computing new ones, with the `file` store.
Also the scheduler time per step with storage over without, with a worker that does nothing and an instant store.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _support import MODEL, begin, median, random_tokens, sized
from server import metrics, send, settled_metrics

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.lab.server.client import Answer, running_server
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.messages import LoadDone, QueryDone, StoreDone, TouchDone
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.lab.server.harness import Harness
from tests.storage.values import namespace

LENGTHS = sized((320, 512, 1_000, 2_000), (512,))
"""Fewer than 256 tokens in full blocks are not asked for."""
PROMPTS = sized(4, 1)
"""Of each length."""

NEW = 1_000_000
SERVE = (*MODEL, "--num-gpu-blocks-override", "400", "--swap-space", "2", "--write-policy", "write_through")
STORED = 'storage_blocks_total{direction="store"}'

STEP_BLOCK = 16
STEP_REQUESTS = sized(300, 4)
STEP_PROMPT = 64
"""Blocks."""


def prompt(length: int, number: int) -> tuple[int, ...]:
    return random_tokens(100_000 * length + number, length)


def first_tokens(directory: Path) -> dict[str, Any]:
    flags = (*SERVE, "--kvcache-storage-backend", "file", "--kvcache-storage-dir", str(directory))
    prompts = [(length, number) for number in range(PROMPTS) for length in LENGTHS]
    with running_server(flags) as url:
        first = {key: send(url, prompt(*key)) for key in prompts}
        blocks = sum(length // KVCacheConfig.block_size for length, _ in prompts)
        while metrics(url).get(STORED, 0) < 0.98 * blocks:
            settled_metrics(url)
    stored, new, again = {}, {}, {}
    with running_server(flags) as url:
        send(url, prompt(LENGTHS[-1], NEW - 1))  # warm-up
        seconds = 0.0
        for length, number in prompts:
            start = time.monotonic()
            stored[length, number] = send(url, prompt(length, number))
            seconds += time.monotonic() - start
            new[length, number] = send(url, prompt(length, NEW + number))
        for key in prompts:
            again[key] = send(url, prompt(*key))
    same = all(first[key].token_ids == stored[key].token_ids == again[key].token_ids for key in prompts)
    rows = {
        str(length): {
            "computed_ms": 1e3 * median(_first(new, length)),
            "stored_ms": 1e3 * median(_first(stored, length)),
            "cached_ms": 1e3 * median(_first(again, length)),
            "stored_over_computed": median(
                [mine / other for mine, other in zip(_first(stored, length), _first(new, length), strict=True)]
            ),
        }
        for length in LENGTHS
    }
    hits = {name: sum(answer.cached_tokens for answer in run.values()) for name, run in (("a", stored), ("b", again))}
    return {
        "first_token": rows,
        "hits_after_restart_over_warm": hits["a"] / hits["b"],
        "seconds_after_restart": seconds,
        "tokens_identical": same,
    }


def _first(answers: dict[tuple[int, int], Answer], length: int) -> list[float]:
    return [answers[length, number].first_token_s for number in range(PROMPTS)]


class InstantLink:
    """A `StoreLink` to an empty store that takes every block and answers at once."""

    num_ranks, is_serving = 1, True

    def __init__(self) -> None:
        self.answers: list[QueryDone | LoadDone | StoreDone | TouchDone] = []

    def query(self, query_id: str, hashes: object) -> None:
        self.answers.append(QueryDone(query_id, 0))

    def use_namespace(self, namespace: object) -> None:
        pass

    def store(self, store_id: str, hashes: object, slots: Sequence[int]) -> None:
        self.answers.append(StoreDone(store_id, len(slots)))

    def load(self, load_id: str, hashes: object, slots: object) -> None:
        self.answers.append(LoadDone(load_id, 0))

    def touch(self, touch_id: str, hashes: object) -> None:
        self.answers.append(TouchDone(touch_id, 0))


class Core:
    def __init__(self, *, storage: bool) -> None:
        config = KVCacheConfig(4096, 16_384, block_size=STEP_BLOCK, write_policy=WritePolicy.WRITE_THROUGH)
        self.link = InstantLink()

        def tier(manager: Any, worker: Any) -> StorageTier:
            settings = StorageSettings("file", prefetch="best_effort", min_tokens=1)
            return StorageTier(manager, settings, namespace(block_size=STEP_BLOCK), self.link)

        self.harness = Harness(
            config, max_num_batched_tokens=STEP_BLOCK * STEP_PROMPT * 2, storage=tier if storage else None
        )
        self.manager_check, self.harness.manager.check = self.harness.manager.check, lambda: None  # type: ignore[method-assign]

    def serve(self, name: str, tokens: tuple[int, ...]) -> list[float]:
        """Seconds of each step of one request, without the worker's time."""
        core, seconds = self.harness.core, []
        start = time.perf_counter()
        self.harness.submit(name, tokens, 4)
        while True:
            core.step()
            spent = time.perf_counter() - start
            if not self.harness.sent:
                return seconds
            result = self.harness.worker.run(self.harness.sent.pop())
            start = time.perf_counter()
            core.on_step_result(result)
            for answer in self.link.answers:
                core.on_storage(answer)
            self.link.answers.clear()
            seconds.append(spent + time.perf_counter() - start)
            start = time.perf_counter()


def steps() -> dict[str, Any]:
    cores = {"without": Core(storage=False), "with": Core(storage=True)}
    seconds: dict[str, list[float]] = {name: [] for name in cores}
    for number in range(STEP_REQUESTS):
        tokens = random_tokens(number // 2, STEP_BLOCK * STEP_PROMPT)
        for name, core in cores.items():
            seconds[name] += core.serve(f"r{number}", tokens)
    means = {name: 1e6 * sum(each) / len(each) for name, each in seconds.items()}
    return {
        "mean_us": means,
        "median_us": {name: 1e6 * median(each) for name, each in seconds.items()},
        "ratio_of_means": means["with"] / means["without"],
    }


def main() -> None:
    run = begin()
    with tempfile.TemporaryDirectory() as directory:
        served = first_tokens(Path(directory) / "kv")
    run.save({**served, "steps": steps()})


if __name__ == "__main__":
    main()
