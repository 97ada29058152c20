"""Tenants of one real server, and of two that share a storage directory, never find each other's blocks."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from tests.e2e.server_process import started, wait_until
from tests.e2e.test_storage import CACHED, PROMPT, end, flags, wait_stored

pytestmark = pytest.mark.process


def ask(server, prompt=PROMPT, **fields):
    """Tokens of the answer, and how many of the prompt were cached."""
    with server.client() as client:
        answer = client.completions.create(
            model="default", prompt=prompt, max_tokens=4, temperature=0, extra_body={"return_token_ids": True, **fields}
        )
    return answer.choices[0].token_ids, answer.usage.prompt_tokens_details.cached_tokens


def chat(server, **fields):
    messages = [{"role": "user", "content": "what one tenant asks " * 20}]
    with server.client() as client:
        answer = client.chat.completions.create(
            model="default", messages=messages, max_tokens=4, temperature=0, extra_body=fields
        )
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens


def computed(server):
    return server.metrics()["computed_tokens_total"]


def test_tenants_meet_neither_in_the_tiers_nor_in_the_store_nor_in_a_batch(tmp_path):
    directory = tmp_path / "kv"
    with started(tmp_path / "one", *flags(directory)) as server:
        tokens, cached = ask(server)
        assert cached == 0
        for salt in ("a", "b"):
            assert ask(server, cache_salt=salt) == (tokens, 0)
            assert ask(server, cache_salt=salt) == (tokens, CACHED)
        assert ask(server) == (tokens, CACHED)
        text, cached = chat(server, cache_salt="a")
        assert cached == 0
        assert chat(server, cache_salt="b") == (text, 0)
        assert chat(server, cache_salt="a")[1] > 0
        blocks = 3 * CACHED // 16
        wait_stored(server, blocks)

        before = computed(server)
        with ThreadPoolExecutor(9) as pool:
            others = [
                pool.submit(ask, server, PROMPT[::-1], cache_salt=salt) for salt in ("x", "y", "z") for _ in range(3)
            ]
            assert len({tuple(each.result()[0]) for each in others}) == 1
        assert computed(server) - before >= 3 * CACHED, "each tenant's prompt is computed for itself"

        before = server.metrics()
        assert ask(server, skip_reading_prefix_cache=True) == (tokens, 0)
        assert server.metrics()["query_tokens_total"] == before["query_tokens_total"]
        fresh = PROMPT[300:] + PROMPT[:300]
        for _ in range(2):
            assert ask(server, fresh, skip_writing_prefix_cache=True)[1] == 0
        assert ask(server, fresh)[1] == 0, "nothing was left by the two before"
        assert ask(server, fresh)[1] == CACHED
        with pytest.raises(openai.BadRequestError, match="cache_salt: must be a string of 1 to 1024 characters"):
            ask(server, cache_salt="")
        end(server)
    with started(tmp_path / "two", *flags(directory)) as server:
        assert ask(server, cache_salt="c") == (tokens, 0)
        assert server.metrics()["storage_blocks_total{direction=load}"] == 0
        assert ask(server, skip_reading_prefix_cache=True, cache_salt="a") == (tokens, 0)
        assert server.metrics()["storage_blocks_total{direction=load}"] == 0
        assert ask(server, cache_salt="b") == (tokens, CACHED)
        assert server.metrics()["storage_blocks_total{direction=load}"] == CACHED / 16
        wait_until(lambda: server.wait_idle()["ok"], "no leak")
        end(server)
