"""Shares of tokens that hit after a restart, and blocks written to storage, by what is stored: by each write policy,
and by `write_through` where storage takes a block only once it was hit. Requests do not overlap; loads take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from _support import begin, generated_trace, sized, trace_name

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import BlockHash, NoSpace
from fastdeploy_kvcache_v1.lab.replay.hashes import TraceHasher
from fastdeploy_kvcache_v1.lab.replay.trace import read_trace
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

BLOCK_SIZE = 64
GENERATED = sized(6_000, 100)
PUBLIC_SIZES, GENERATED_SIZES = (12_500, 25_000), sized((4_000, 8_000), (400, 800))
"""Blocks of device and host."""
AFTER_RESTART = sized(500, 20)
REUSED = "write_through, stored once hit"


class Played(NamedTuple):
    at_s: float
    prompt: list[BlockHash]
    output: list[BlockHash]


class Server:
    """A cache whose `store` has room for all."""

    def __init__(self, policy: str, sizes: tuple[int, int], store: set[BlockHash]) -> None:
        self._stores_copies = policy != REUSED
        config = KVCacheConfig(
            *sizes, block_size=1, write_policy=WritePolicy.WRITE_THROUGH if policy == REUSED else WritePolicy(policy)
        )
        self._now = 0.0
        self._manager = CacheManager(config, lambda: self._now)
        self._store = store
        self.asked = self.hits = 0

    @property
    def share(self) -> float:
        return self.hits / self.asked

    def play(self, request: Played) -> None:
        manager, prompt, output = self._manager, request.prompt, request.output
        self._now = max(self._now, request.at_s)
        self._use_store(prompt)
        sequence = GivenHashes(prompt, len(prompt) + 1)
        manager.match_prefix("request", sequence)
        found = manager.allocate("request", len(prompt) + 1)
        if isinstance(found, NoSpace):
            manager.release("request")
            return
        self.asked += len(prompt)
        self.hits += found.num_cached_tokens
        self._step()
        manager.commit("request", len(prompt))
        self._step()
        if not isinstance(manager.allocate("request", len(prompt) + len(output) + 1), NoSpace):
            sequence.hashes, sequence.num_tokens = prompt + output, len(prompt) + len(output) + 1
            self._step()
            manager.commit("request", len(prompt) + len(output))
        manager.finish("request")
        self._step()

    def _use_store(self, prompt: list[BlockHash]) -> None:
        """Store what is cached of a prompt on the host and is missing; load what is stored behind the cached blocks."""
        manager, cached = self._manager, self._manager.count_cached(prompt)
        missing = next((number for number in range(cached) if prompt[number] not in self._store), cached)
        if missing < cached:
            self._keep(manager.begin_host_store("store", prompt, missing, most=cached - missing).hashes)
        behind = range(cached, len(prompt))
        stored = next((number for number in behind if prompt[number] not in self._store), len(prompt))
        if cached < stored:
            load = manager.begin_load("load", prompt, cached, most=stored - cached)
            if not isinstance(load, NoSpace):
                manager.complete_load("load", len(load.slots))

    def _step(self) -> None:
        step = self._manager.take_swap_step()
        if step.swap_out and self._stores_copies:
            source = self._manager.begin_store("store", step.step, frozenset(step.swap_out.target_slots))
            self._keep(source.hashes)

    def _keep(self, blocks: Sequence[BlockHash]) -> None:
        """Also a block whose prefix is not stored: that may leave the device later."""
        self._store.update(blocks)
        if blocks:
            self._manager.end_store("store")


def read(trace: Path, num_device_blocks: int, limit: int) -> list[Played]:
    """Prompts take half of the device at most, outputs a quarter."""
    hasher = TraceHasher(BLOCK_SIZE)
    most = num_device_blocks // 2
    requests = []
    for request in read_trace(trace, limit):
        prompt, output = hasher.prompt_hashes(request), hasher.output_hashes(request)
        output = output[: most // 2] if len(prompt) <= most else []
        requests.append(Played(request.timestamp_ms / 1000, prompt[:most], output))
    return requests


def case(requests: Sequence[Played], sizes: tuple[int, int], policy: str) -> dict[str, object]:
    """Play the first half, restart, and play the second."""
    store: set[BlockHash] = set()
    before, after = Server(policy, sizes, store), Server(policy, sizes, store)
    half = len(requests) // 2
    for request in requests[:half]:
        before.play(request)
    for request in requests[half : half + AFTER_RESTART]:
        after.play(request)
    soon = after.share
    for request in requests[half + AFTER_RESTART :]:
        after.play(request)
    return {
        "policy": policy,
        "before": before.share,
        "soon": soon,
        "after": after.share,
        "written": len(store),
    }


def main() -> None:
    run = begin(trace=True)
    name = trace_name(run.options.trace)
    generated = ((kind, generated_trace(kind, GENERATED), GENERATED_SIZES) for kind in ("agents", "chat", "sessions"))
    traces = ((name, run.options.trace, sized(PUBLIC_SIZES, GENERATED_SIZES)), *generated)
    policies = (*(policy.value for policy in WritePolicy), REUSED)
    cases = [
        {"traffic": kind, "sizes": sizes, **case(requests, sizes, policy)}
        for kind, trace, sizes in traces
        for requests in [read(trace, sizes[0], GENERATED)]
        for policy in policies
    ]
    run.save({"trace": name, "after_restart": AFTER_RESTART, "cases": cases})


if __name__ == "__main__":
    main()
