"""Our tokenizer, chat template, conversion and engine against what transformers computed once (`make_oracle.py`)."""

import json
from pathlib import Path

import httpx2
import numpy as np
import paddle
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, ModelFetchError
from fastdeploy_kvcache_v1.lab.hub.smollm2 import SMOLLM2, fetch
from fastdeploy_kvcache_v1.lab.model import load_model_config
from fastdeploy_kvcache_v1.lab.model.llama import Llama
from fastdeploy_kvcache_v1.lab.model.step import SequenceSlice
from fastdeploy_kvcache_v1.lab.server.text import load_tokenizer
from tests.e2e.server_process import started

ORACLE = json.loads((Path(__file__).parent / "smollm2.json").read_text(encoding="utf-8"))
GENERATIONS = ORACLE["generations"]

BLOCK_SIZE = 64
GAP_TOLERANCE = 2e-3
"""Both sides compute in float32, in another order; the smallest gap of the oracle is six times that."""


@pytest.fixture(scope="module")
def directory():
    try:
        return fetch(SMOLLM2, print)
    except ModelFetchError as error:
        pytest.skip(f"needs SmolLM2: {error}")


@pytest.fixture(scope="module")
def tokenizer(directory):
    return load_tokenizer(directory)


def test_the_oracle_decides_every_token():
    """No two logits are so close that rounding could choose another token."""
    assert min(min(each["gaps"]) for each in GENERATIONS) > 5 * GAP_TOLERANCE
    assert len(GENERATIONS) >= 20


NO_MESSAGES = "no messages"
"""transformers looks at the list before the template does; here the API does, see the test of the server."""


@pytest.mark.parametrize("name", [name for name in ORACLE["chats"] if name != NO_MESSAGES])
def test_chats_become_the_same_tokens(tokenizer, name):
    chat = ORACLE["chats"][name]
    if chat["ids"] is None:
        with pytest.raises(ConfigError, match="chat template rejects these messages"):
            tokenizer.apply_chat_template(chat["messages"])
    else:
        assert tokenizer.apply_chat_template(chat["messages"]) == chat["ids"]


@pytest.mark.parametrize("case", ORACLE["texts"], ids=lambda case: repr(case["text"][:20]))
def test_texts_become_the_same_tokens(tokenizer, case):
    assert tokenizer.encode(case["text"]) == case["ids"]


def gap_of(logits):
    second, best = np.partition(logits, -2)[-2:]
    return float(best - second)


@pytest.fixture(scope="module")
def decoder(directory):
    return Llama.load(directory, load_model_config(directory))


@pytest.mark.parametrize("first", range(3))
def test_greedy_tokens_and_their_lead_are_the_same(decoder, first):
    """A third of the prompts as one batch: prefill, then one token per sequence and step."""
    config, expected = decoder.config, GENERATIONS[first::3]
    num_steps = len(expected[0]["tokens"])
    sizes = [-(-(len(each["ids"]) + num_steps) // BLOCK_SIZE) for each in expected]
    ends = np.cumsum(sizes)
    tables = [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]
    shape = [int(ends[-1]), config.num_kv_heads, BLOCK_SIZE, config.head_dim]
    caches = [paddle.zeros(shape, dtype="float32") for _ in range(2 * config.num_layers)]
    new, starts = [each["ids"] for each in expected], [0] * len(expected)
    tokens, gaps = [], []
    for _ in range(num_steps):
        slices = [SequenceSlice(np.array(ids), *rest) for ids, *rest in zip(new, starts, tables, strict=True)]
        logits = decoder.forward(slices, caches)
        tokens.append([int(row.argmax()) for (row,) in logits])
        gaps.append([gap_of(row) for (row,) in logits])
        starts = [each.end for each in slices]
        new = [[token] for token in tokens[-1]]
    assert np.transpose(tokens).tolist() == [each["tokens"] for each in expected]
    np.testing.assert_allclose(np.transpose(gaps), [each["gaps"] for each in expected], rtol=0, atol=GAP_TOLERANCE)


@pytest.mark.process
def test_the_server_gives_these_tokens_computed_and_cached(directory, tmp_path):
    """`--model smollm2`, each prompt twice: the second time the longest comes out of the cache."""
    asked = [GENERATIONS[0], max(GENERATIONS, key=lambda each: len(each["ids"]))]
    with started(tmp_path, "--model", "smollm2", "--block-size", "32") as server, server.client() as client:
        assert f"serves {SMOLLM2.name}. " in server.stdout
        for full_blocks in (0, 32):
            for generation in asked:
                ids, num_tokens = generation["ids"], len(generation["tokens"])
                answer = client.completions.create(
                    **{"model": SMOLLM2.name, "prompt": ids, "max_tokens": num_tokens, "temperature": 0},
                    extra_body={"return_token_ids": True, "ignore_eos": True},
                )
                assert answer.choices[0].token_ids == generation["tokens"]
                cached = answer.usage.prompt_tokens_details.cached_tokens
                assert cached == (full_blocks and (len(ids) - 1) // full_blocks * full_blocks)
        question = ORACLE["chats"]["user"]["messages"]
        chat = client.chat.completions.create(model=SMOLLM2.name, messages=question, max_tokens=20, temperature=0)
        assert chat.choices[0].message.content == "The capital of France is Paris."
        assert chat.usage.prompt_tokens_details.cached_tokens == 32
        body = {"messages": ORACLE["chats"][NO_MESSAGES]["messages"]}
        empty = httpx2.post(f"{server.url}/v1/chat/completions", json=body)
        assert empty.status_code == 400
        assert ORACLE["chats"][NO_MESSAGES]["ids"] is None
