"""Time to the first and second token of new prompts, with prefill and decode servers and a router over a mixed server.
All servers share the cores, in turns, so the figures do not show the gain of two machines.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from _support import MODEL, begin, median, random_tokens, sized

from fastdeploy_kvcache_v1.lab.server.client import Answer, complete, free_port, running_server

PROMPT_TOKENS = 2_000
NUM_PROMPTS = sized(8, 1)
SERVE = (*MODEL, "--num-gpu-blocks-override", "400", "--max-num-batched-tokens", "512")


@contextmanager
def router(prefill: str, decode: str, flags: tuple[str, ...]) -> Iterator[str]:
    port = free_port()
    command = [sys.executable, "-m", "fastdeploy_kvcache_v1.cli", "router", "--port", str(port)]
    with subprocess.Popen([*command, *flags, "--prefill", prefill, "--decode", decode]) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url)
            yield url
        finally:
            process.terminate()


def _wait_until_healthy(url: str) -> None:
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.1)


def ask(url: str, tokens: tuple[int, ...]) -> Answer:
    """Ask for two tokens: the first arrives after `first_token_s`, the second after `total_s`."""
    return complete(url, tokens, 2)


def gap_s(answer: Answer) -> float:
    return answer.total_s - answer.first_token_s


def measure(mixed: str, routed: str) -> dict[str, Any]:
    for url in (mixed, routed):
        ask(url, random_tokens(10**6, PROMPT_TOKENS))  # warm-up
    rows = []
    for seed in range(NUM_PROMPTS):
        urls = (mixed, routed) if seed % 2 else (routed, mixed)
        answers = {url: ask(url, random_tokens(seed, PROMPT_TOKENS)) for url in urls}
        rows.append((answers[mixed], answers[routed]))
    return {
        "mixed_first_token_ms": 1e3 * median(alone.first_token_s for alone, _ in rows),
        "roles_first_token_ms": 1e3 * median(two.first_token_s for _, two in rows),
        "first_token_over_mixed": median(two.first_token_s / alone.first_token_s for alone, two in rows),
        "mixed_second_token_ms": 1e3 * median(map(gap_s, (alone for alone, _ in rows))),
        "roles_second_token_ms": 1e3 * median(map(gap_s, (two for _, two in rows))),
        "tokens_identical": all(alone.token_ids == two.token_ids for alone, two in rows),
    }


def main() -> None:
    run = begin()
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        secret = Path(directory) / "secret"
        secret.write_text("the secret of this benchmark")
        secret.chmod(0o600)
        shared = ("--peer-secret-file", str(secret))
        mixed = stack.enter_context(running_server(SERVE))
        prefill = stack.enter_context(running_server([*SERVE, "--role", "prefill", *shared]))
        decode = stack.enter_context(running_server([*SERVE, "--role", "decode", *shared]))
        routed = stack.enter_context(router(prefill, decode, shared))
        measured = measure(mixed, routed)
    run.save({"prompt_tokens": PROMPT_TOKENS, "prompts": NUM_PROMPTS, "model": "SmolLM2", **measured})


if __name__ == "__main__":
    main()
