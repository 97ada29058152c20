"""A real model through the real FastDeploy: the tokens that transformers computed once, and a cache hit."""

import json
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.errors import ModelFetchError
from fastdeploy_kvcache_v1.lab.hub.smollm2 import SMOLLM2, fetch

from .cpu_server import BLOCK_SIZE, ask, started, wait_until

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(600)]

ORACLE = json.loads((Path(__file__).parents[1] / "oracle" / "smollm2.json").read_text(encoding="utf-8"))
END = 2
"""The token that ends an answer."""


def until_the_end(tokens):
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def test_fastdeploy_answers_what_transformers_computed(release, tmp_path):
    try:
        fetch(SMOLLM2, print)
    except ModelFetchError as error:
        pytest.skip(f"needs SmolLM2: {error}")
    generations = ORACLE["generations"]
    longest = max(generations, key=lambda each: len(each["ids"]))
    with started(release, tmp_path, "--model", "smollm2") as (server, client):
        question = ORACLE["chats"]["user"]["messages"]
        assert ask(client, question, max_tokens=20).text == "The capital of France is Paris."
        for _ in range(2):
            for generation in (generations[2], longest):
                num_tokens = len(generation["tokens"])
                answer = client.completions.create(
                    **{"model": "tiny", "prompt": generation["ids"], "max_tokens": num_tokens, "temperature": 0},
                    **{"top_p": 0, "extra_body": {"return_token_ids": True}},
                )
                said, expected = answer.choices[0].completion_token_ids, until_the_end(generation["tokens"])
                assert len(said) == len(expected)
                assert said[:-1] == expected[:-1]
                assert said[-1] == END, "FastDeploy puts it in the place of the last token at max_tokens"
        hits = (len(longest["ids"]) - 1) // BLOCK_SIZE * BLOCK_SIZE
        wait_until(lambda: server.metrics()["device_hit_tokens_total"] == hits, f"{hits} hits of the longest prompt")
