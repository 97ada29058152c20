"""What a host tier is worth by the speed of its copies: time to the first token of a prompt that is computed, and of
one that the host has, where every copy of a layer is delayed. Usage: python benchmarks/load_or_compute.py
"""

from __future__ import annotations

import json
import random
import time
import urllib.request
from typing import Any

from _support import median, save

from fastdeploy_kvcache_v1.embedded.process import running_server

LENGTHS = (500, 1000, 2000, 4000)
DELAYS_MS = (0.0, 5.0, 50.0, 500.0)
ROUNDS = 5
DEVICE_TOKENS = 4800
FLAGS = (
    *("--num-gpu-blocks-override", str(DEVICE_TOKENS // 64), "--swap-space", "0.2", "--write-policy", "write_through"),
    *("--max-model-len", "4700", "--max-num-batched-tokens", "4700", "--max-num-seqs", "4"),
)
METRIC = "fastdeploy:kvcache_v1_"


def text(seed: str, length: int) -> str:
    return "".join(random.Random(seed).choices("abcdefghij ", k=length))


def first_token_s(url: str, prompt: str) -> float:
    body = json.dumps({"prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    began = time.perf_counter()
    with urllib.request.urlopen(request, timeout=600) as reply:
        reply.read()
    return time.perf_counter() - began


def counter(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as reply:
        lines = reply.read().decode().splitlines()
    return next(float(line.split()[-1]) for line in lines if line.startswith(f"{METRIC}{name}_total "))


def push_out(url: str, seed: str) -> None:
    first_token_s(url, text(f"other {seed}", 4600))


def measure(url: str, delay_ms: float, length: int) -> dict[str, Any]:
    """Each round has a prompt of its own, asked for twice."""
    computed, from_host = [], []
    declined = counter(url, "declined_load_tokens")
    for number in range(ROUNDS):
        prompt = text(f"{length} {number}", length)
        computed.append(first_token_s(url, prompt))
        push_out(url, f"{length} {number}")
        from_host.append(first_token_s(url, prompt))
    declined = counter(url, "declined_load_tokens") - declined
    return {
        "delay_ms": delay_ms,
        "length": length,
        "computed_s": median(computed),
        "from_host_s": median(from_host),
        "from_host_to_computed": median(from_host) / median(computed),
        "share_declined": declined / (ROUNDS * (length // 64 * 64)),
    }


def main() -> None:
    rows = []
    for delay_ms in DELAYS_MS:
        faults = {"FASTDEPLOY_KVCACHE_COPY_FAULTS": json.dumps({"delay_ms": {"input": delay_ms}})}
        with running_server(FLAGS, faults) as url:
            for number, length in enumerate((500, 4000, 1000, 2000)):  # what copies and computing cost is measured
                prompt = text(f"first {number}", length)
                first_token_s(url, prompt)
                push_out(url, f"first {number}")
                first_token_s(url, prompt)
            rows += [measure(url, delay_ms, length) for length in LENGTHS]
    save("load_or_compute", {"flags": " ".join(FLAGS), "rounds": ROUNDS, "rows": rows})


if __name__ == "__main__":
    main()
