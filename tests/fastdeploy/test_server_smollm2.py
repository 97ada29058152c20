"""A real model through the real FastDeploy: the tokens that transformers computed once, and a cache hit."""

import json
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.errors import ModelFetchError
from fastdeploy_kvcache_v1.model_hub.smollm2 import SMOLLM2, fetch

from .cpu_server import BLOCK_SIZE, started
from .fastdeploy_trees import tree

pytestmark = [pytest.mark.fastdeploy, pytest.mark.timeout(600)]

ORACLE = json.loads((Path(__file__).parents[1] / "oracle" / "smollm2.json").read_text(encoding="utf-8"))
END = 2
"""The token that ends an answer."""


def until_the_end(tokens):
    return tokens[: tokens.index(END) + 1] if END in tokens else tokens


def test_fastdeploy_answers_what_transformers_computed(release, tmp_path):
    tree(release)
    try:
        fetch(SMOLLM2, print)
    except ModelFetchError as error:
        pytest.skip(f"needs SmolLM2: {error}")
    generations = ORACLE["generations"]
    longest = max(generations, key=lambda each: len(each["ids"]))
    with started(release, tmp_path, "--model", "smollm2") as server, server.client() as client:
        question = ORACLE["chats"]["user"]["messages"]
        assert server.ask(client, question, max_tokens=20).text == "The capital of France is Paris."
        for cached_blocks in (0, (len(longest["ids"]) - 1) // BLOCK_SIZE):
            for generation in (generations[2], longest):
                num_tokens = len(generation["tokens"])
                answer = client.completions.create(
                    **{"model": "tiny", "prompt": generation["ids"], "max_tokens": num_tokens, "temperature": 0},
                    **{"top_p": 0, "extra_body": {"return_token_ids": True}},
                )
                assert answer.choices[0].completion_token_ids == until_the_end(generation["tokens"])
            assert answer.usage.prompt_tokens_details.cached_tokens == cached_blocks * BLOCK_SIZE
        assert server.stop() == 0, server.stderr
