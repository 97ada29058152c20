"""Time to the first token of a repeated prompt from the device tier and from the host tier, over computing it.
Each prompt is sent new, at once again, and after three other prompts evicted it from the device tier.
"""

from __future__ import annotations

import re
import time
import urllib.request
from collections import defaultdict
from typing import Any

from _support import MODEL, begin, median, percentile, random_tokens, sized

from fastdeploy_kvcache_v1.lab.server.client import Answer, complete, running_server
from fastdeploy_kvcache_v1.telemetry.metrics import PREFIX

PROMPT_TOKENS = 2_000
NUM_PROMPTS = sized(6, 1)
DEVICE_BLOCKS = 80
"""Two and a half prompts of 2,000 tokens in blocks of 64."""
SERVE = (
    *MODEL, "--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--swap-space", "1", "--write-policy", "write_through",
)  # fmt: skip
METRIC = re.compile(rf"^{PREFIX}(\w+)(?:\{{(.*)\}})? (\S+)$", re.MULTILINE)


def prompt(seed: int) -> tuple[int, ...]:
    return random_tokens(seed, PROMPT_TOKENS)


def send(url: str, tokens: tuple[int, ...], max_tokens: int = 4) -> Answer:
    return complete(url, tokens, max_tokens)


def metrics(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as response:
        text = response.read().decode()
    return {f"{name}{{{labels}}}" if labels else name: float(value) for name, labels, value in METRIC.findall(text)}


def settled_metrics(url: str) -> dict[str, float]:
    """The metrics once two reads agree, because no copy is running any more."""
    while True:
        before = metrics(url)
        time.sleep(0.1)
        after = metrics(url)
        if before == after:
            return after


def first_tokens(url: str) -> tuple[dict[str, list[Answer]], dict[str, float]]:
    """Answers by the source of the prompt's KV, in the order of the prompts, and the metrics of the host hits."""
    answers: dict[str, list[Answer]] = defaultdict(list)
    costs: dict[str, float] = defaultdict(float)
    send(url, prompt(10**6))  # warm-up
    for seed in range(NUM_PROMPTS):
        answers["computed"].append(send(url, prompt(seed)))
        answers["device"].append(send(url, prompt(seed)))
        for filler in range(3):
            send(url, prompt(10**3 * (seed + 1) + filler), max_tokens=1)
        before = settled_metrics(url)
        answers["host"].append(send(url, prompt(seed), max_tokens=4))
        for name, value in settled_metrics(url).items():
            costs[name] += value - before.get(name, 0.0)
    return answers, costs


def summary(answers: dict[str, list[Answer]]) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for source, measured in answers.items():
        seconds = [answer.first_token_s for answer in measured]
        ratios = [
            answer.first_token_s / computed.first_token_s
            for answer, computed in zip(measured, answers["computed"], strict=True)
        ]
        rows[source] = {
            "first_token_ms": 1e3 * median(seconds),
            "first_token_p90_ms": 1e3 * percentile(seconds, 0.9),
            "ratio_to_computed": median(ratios),
            "cached_tokens": median([answer.cached_tokens for answer in measured]),
        }
    same = all(
        one.token_ids == other.token_ids
        for source in answers.values()
        for one, other in zip(source, answers["computed"], strict=True)
    )
    return {"first_token": rows, "tokens_identical": same}


def copies(costs: dict[str, float], whole_run: dict[str, float]) -> dict[str, Any]:
    """Times of the host hits' copies; `exposed` is the time for which compute waits. `whole_run` adds copies out."""
    swap_in = costs['swap_seconds_total{direction="in",rank="0"}']
    exposed = costs['exposed_wait_seconds_total{rank="0"}']
    all_copies = sum(whole_run[f'swap_seconds_total{{direction="{way}",rank="0"}}'] for way in ("in", "out"))
    return {
        "swapped_in_blocks": costs['swap_blocks_total{direction="in",rank="0"}'],
        "swap_in_ms": 1e3 * swap_in,
        "swap_in_gb_per_s": costs['swap_bytes_total{direction="in",rank="0"}'] / swap_in / 1e9,
        "exposed_wait_ms": 1e3 * exposed,
        "exposed_share": exposed / swap_in,
        "whole_run": {
            "swapped_out_blocks": whole_run['swap_blocks_total{direction="out",rank="0"}'],
            "copies_ms": 1e3 * all_copies,
            "exposed_wait_ms": 1e3 * whole_run['exposed_wait_seconds_total{rank="0"}'],
            "exposed_share": whole_run['exposed_wait_seconds_total{rank="0"}'] / all_copies,
        },
    }


def main() -> None:
    run = begin()
    with running_server(SERVE) as url:
        answers, costs = first_tokens(url)
        measured = {**summary(answers), "copies": copies(costs, settled_metrics(url))}
    sizes = {"prompt_tokens": PROMPT_TOKENS, "prompts": NUM_PROMPTS, "device_blocks": DEVICE_BLOCKS}
    run.save({**sizes, **measured})


if __name__ == "__main__":
    main()
