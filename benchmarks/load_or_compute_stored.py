"""Time to the first token of stored prompts where the server chooses between loading and computing.
It is compared with the faster of two servers, one that always loads and one that always computes, by disk speed.

The store is a directory that another server has filled. Its reads are slowed down to a rate. No server gets a prompt
twice, so its own tiers never hold the prompt.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from _support import MODEL, ROOT, begin, median, random_tokens, sized
from server import metrics, send, settled_metrics

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.server.client import Answer, running_server

LENGTHS = sized((256, 512, 1_024, 2_048), (512,))
RATES_MB_S = sized((1e6, 40.0, 20.0, 10.0, 5.0), (1e6,))
"""The first rate is no limit."""

ROUNDS = sized(5, 1)
LEARNING = 1
"""Rounds before, in which servers learn the costs of loading and computing."""

NEW = 1_000
"""Distance between the numbers of new prompts of two rates."""

SERVE = (
    *MODEL,
    *("--num-gpu-blocks-override", "300", "--swap-space", "2", "--write-policy", "write_through"),
    *("--max-model-len", "2200", "--max-num-batched-tokens", "2200"),
)
POLICIES = {"weighs": "timeout", "loads": "wait_complete"}
COMPUTES = "computes"
PREFIX = "storage_blocks_total"


def prompt(length: int, number: int) -> tuple[int, ...]:
    return random_tokens(100_000 * length + number, length)


def fill(flags: tuple[str, ...]) -> None:
    """Store all prompts."""
    prompts = [prompt(length, number) for number in range(LEARNING + ROUNDS) for length in LENGTHS]
    num_blocks = sum(len(each) // KVCacheConfig.block_size for each in prompts)
    with running_server(flags) as url:
        for each in prompts:
            send(url, each, 1)
        while metrics(url).get(f'{PREFIX}{{direction="store"}}', 0) < num_blocks:
            settled_metrics(url)


def ask(urls: dict[str, str], length: int, number: int, new: int) -> dict[str, Answer]:
    """Send one prompt to every server, in an order that rotates, and compare their tokens.

    The server that chooses gets a new prompt first, as servers do: while it loads, it learns no cost of computing.
    It stores that prompt, so every rate needs new prompts of its own.
    """
    send(urls["weighs"], prompt(length, new + number), 1)
    names = [*urls][number % len(urls) :] + [*urls][: number % len(urls)]
    answers = {name: send(urls[name], prompt(length, number), 1) for name in names}
    assert len({tuple(answer.token_ids) for answer in answers.values()}) == 1, "the store changed a token"
    return answers


def measure(urls: dict[str, str], new: int) -> list[dict[str, Any]]:
    """Rows by length. `new` is the first number of prompts that are not stored."""
    for number in range(LEARNING):
        for length in LENGTHS:
            ask(urls, length, number, new)
    answers: dict[int, list[dict[str, Answer]]] = {length: [] for length in LENGTHS}
    for number in range(LEARNING, LEARNING + ROUNDS):
        for length in LENGTHS:
            answers[length].append(ask(urls, length, number, new))
    return [row(length, answers[length]) for length in LENGTHS]


def row(length: int, answers: list[dict[str, Answer]]) -> dict[str, Any]:
    """`over_better` is the median of the choosing server over the smaller median of the other two."""
    seconds = {name: [answer[name].first_token_s for answer in answers] for name in (*POLICIES, COMPUTES)}
    medians = {name: median(each) for name, each in seconds.items()}
    return {
        "length": length,
        **{f"{name}_ms": 1e3 * each for name, each in medians.items()},
        "over_better": medians["weighs"] / min(medians["loads"], medians[COMPUTES]),
        "computes_spread": max(seconds[COMPUTES]) / min(seconds[COMPUTES]),
        "share_loaded": sum(answer["weighs"].cached_tokens for answer in answers) / (ROUNDS * (length // 64 * 64)),
        "loads_found": sum(answer["loads"].cached_tokens for answer in answers) / (ROUNDS * (length // 64 * 64)),
        "seconds": seconds,
    }


def main() -> None:
    run = begin()
    rates = []
    with tempfile.TemporaryDirectory() as directory:
        flags = (*SERVE, "--kvcache-storage-backend", "file", "--kvcache-storage-dir", str(Path(directory) / "kv"))
        fill(flags)
        path = os.pathsep.join([str(ROOT / "benchmarks" / "slow_disk"), os.environ.get("PYTHONPATH", "")])
        for turn, rate in enumerate(RATES_MB_S, 1):
            slow = {"PYTHONPATH": path, "FASTDEPLOY_KVCACHE_BENCH_READ_MB_S": str(rate)}
            with ExitStack() as servers:
                urls = {
                    name: servers.enter_context(running_server((*flags, "--storage-prefetch", policy), slow))
                    for name, policy in POLICIES.items()
                }
                urls[COMPUTES] = servers.enter_context(running_server(SERVE))
                rates.append({"mb_s": rate, "lengths": measure(urls, turn * NEW)})
        sizes = [path.stat().st_size for path in Path(directory).rglob("*") if path.is_file()]
    run.save({"flags": " ".join(SERVE), "block_bytes": median(sizes), "rates": rates})


if __name__ == "__main__":
    main()
