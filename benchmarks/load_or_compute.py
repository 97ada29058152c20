"""What a host tier is worth by the speed of its copies: time to the first token of a prompt that is computed, and of
one that the host has, where every copy of a layer is delayed. Usage: python benchmarks/load_or_compute.py
"""

from __future__ import annotations

import json
from typing import Any

from _support import MODEL, median, random_tokens, save
from server import metrics, send

from fastdeploy_kvcache_v1.embedded.process import running_server

LENGTHS = (256, 512, 1024)
DELAYS_MS = (0.0, 2.0, 20.0, 200.0)
ROUNDS = 5
DEVICE_TOKENS = 1280
FLAGS = (
    *MODEL,
    *("--num-gpu-blocks-override", str(DEVICE_TOKENS // 64), "--swap-space", "1", "--write-policy", "write_through"),
    *("--max-model-len", "1200", "--max-num-batched-tokens", "1200", "--max-num-seqs", "4"),
)
PUSHES_OUT = 1150
"""Tokens of a prompt after which the device has nothing else."""


def first_token_s(url: str, seed: str, length: int) -> float:
    return send(url, random_tokens(seed, length), 1).first_token_s


def declined_tokens(url: str) -> float:
    return metrics(url).get("declined_load_tokens_total", 0.0)


def measure(url: str, delay_ms: float, length: int, rounds: int = ROUNDS) -> dict[str, Any]:
    """Each round has a prompt of its own, asked for twice."""
    computed, from_host = [], []
    declined = declined_tokens(url)
    for number in range(rounds):
        prompt = f"{rounds} {length} {number}", length
        computed.append(first_token_s(url, *prompt))
        first_token_s(url, f"other {prompt}", PUSHES_OUT)
        from_host.append(first_token_s(url, *prompt))
    declined = declined_tokens(url) - declined
    return {
        "delay_ms": delay_ms,
        "length": length,
        "computed_s": median(computed),
        "from_host_s": median(from_host),
        "from_host_to_computed": median(from_host) / median(computed),
        "share_declined": declined / (rounds * (length // 64 * 64)),
    }


def main() -> None:
    rows = []
    for delay_ms in DELAYS_MS:
        faults = {"FASTDEPLOY_KVCACHE_COPY_FAULTS": json.dumps({"delay_ms": {"input": delay_ms}})}
        with running_server(FLAGS, faults) as url:
            for length in (256, 1024, 512):  # what copies and computing cost is measured
                measure(url, delay_ms, length, rounds=1)
            rows += [measure(url, delay_ms, length) for length in LENGTHS]
    save("load_or_compute", {"flags": " ".join(FLAGS), "rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
