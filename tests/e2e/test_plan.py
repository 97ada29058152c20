"""A plan of a running server beside what a restart with more memory really hits."""

import random

import httpx2
import pytest

from tests.e2e.server_process import started
from tests.sizing import restarts

pytestmark = pytest.mark.process

BLOCK_SIZE = 16
LENGTH = 6 * BLOCK_SIZE + 1
FLAGS = ("--block-size", str(BLOCK_SIZE), "--num-gpu-blocks-override", "40", "--max-model-len", "128")


def test_plan_is_near_what_a_restart_with_twice_the_host_tier_hits(tmp_path):
    def live(gib):
        with started(tmp_path / str(gib), *FLAGS, "--swap-space", str(gib)) as server, httpx2.Client() as client:

            def ask(number):
                prompt = random.Random(number).choices(range(1, 200), k=LENGTH)
                body = {"model": "random-tiny", "prompt": prompt, "max_tokens": 1}
                usage = client.post(f"{server.url}/v1/completions", json=body).raise_for_status().json()["usage"]
                return usage["prompt_tokens_details"]["cached_tokens"], usage["prompt_tokens"]

            return restarts.live(server, ask)

    restarts.check(live(0.002), live(0.004))
