"""A real server computes a cold prefix once that many requests bring at the same time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.server_process import started, wait_until

pytestmark = pytest.mark.process

LENGTH = 8010
"""Bytes, and so tokens, of a prompt."""

FLAGS = (
    *("--num-gpu-blocks-override", "600", "--max-model-len", "9000"),
    *("--max-num-seqs", "24", "--max-num-batched-tokens", "20000"),
)
"""A step could hold two of the prompts."""


def count(server, name):
    return server.metrics()[f"{name}_total"]


def ask(server, text):
    with server.client() as client:
        answer = client.completions.create(model="random-tiny", prompt=text, max_tokens=2, temperature=0)
    return answer.choices[0].text, answer.usage.prompt_tokens


def test_sixteen_equal_prompts_of_8k_tokens_cost_one_prefill(tmp_path):
    with started(tmp_path, *FLAGS) as server, ThreadPoolExecutor(17) as pool:
        other, text = "o" * LENGTH, "abcdefg hij" * (LENGTH // 11 + 1)
        busy = pool.submit(ask, server, other)  # they come while the server computes this one
        wait_until(lambda: count(server, "steps") > 0, "the first step")
        answers = [pool.submit(ask, server, text[:LENGTH]) for _ in range(16)]
        results = [answer.result() for answer in answers]
        assert len(set(results)) == 1
        length = results[0][1]
        assert length >= LENGTH
        computed = count(server, "computed_tokens") - busy.result()[1] - 17  # a token is computed for the second output
        assert computed <= 1.1 * length
        assert count(server, "shared_prefill_requests") > 0
        assert count(server, "shared_prefill_tokens") > LENGTH // 2
        assert server.wait_idle()["ok"]
