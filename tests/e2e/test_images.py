"""A real server sees images: what it finds in the cache is what a brute-force comparison says, and no token changes."""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.lab.server.images import read_image
from tests.e2e.server_process import started
from tests.lab.server import random_text as t
from tests.lab.server.pictures import encoded, noise, part, text

pytestmark = pytest.mark.process

BLOCK = 16
FLAGS = ("--block-size", str(BLOCK), "--max-model-len", "900")
COLD = {"skip_reading_prefix_cache": True, "skip_writing_prefix_cache": True}
SMALL = [encoded(noise(16, 16, seed)) for seed in range(4)]
"""A token each."""
BLOCK_SIZED = [encoded(noise(64, 64, seed)) for seed in range(3)]
LARGE = [encoded(noise(128, 128, seed)) for seed in range(3)]
"""64 tokens each."""


def ask(server, *parts, **fields):
    """Tokens of the answer, and how many of the prompt were cached."""
    with server.client() as client:
        answer = client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": list(parts)}],
            max_tokens=4,
            temperature=0,
            extra_body={"return_token_ids": True, **fields},
        )
    return tuple(answer.choices[0].message.completion_token_ids), answer.usage.prompt_tokens_details.cached_tokens


def seen(parts):
    """What each token of the prompt stands for."""
    tokens = ["begin", "user"]
    for each in parts:
        if each["type"] == "text":
            tokens += each["text"]
        else:
            image = read_image(each["image_url"]["url"])
            tokens += [(image.content_hash, index) for index in range(image.num_tokens)]
    return [*tokens, "end", "assistant"]


class Asked:
    """Prompts so far, compared token by token."""

    def __init__(self, server, *, keeps_all=True):
        """`keeps_all`: the device tier holds all prompts."""
        self._server = server
        self._keeps_all = keeps_all
        self._prompts = []
        self.num_cached = 0

    def ask(self, *parts):
        """The tokens; they are those of the prompt computed alone."""
        prompt = seen(parts)
        common = max((self._common(prompt, before) for before in self._prompts), default=0)
        tokens, cached = ask(self._server, *parts)
        most = min(common, len(prompt) - 1) // BLOCK * BLOCK
        assert cached == most if self._keeps_all else cached <= most
        assert tokens == ask(self._server, *parts, **COLD)[0]
        self._prompts.append(prompt)
        self.num_cached += cached
        return cached

    @staticmethod
    def _common(prompt, before):
        pairs = zip(prompt, before, strict=False)
        return next((index for index, (one, two) in enumerate(pairs) if one != two), min(len(prompt), len(before)))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with started(tmp_path_factory.mktemp("images"), *FLAGS, "--num-gpu-blocks-override", "600") as running:
        yield running
        assert running.wait_idle()["ok"]


@pytest.mark.parametrize("num_blocks", [600, 36])
def test_any_prompts_hit_what_they_have_in_common_and_change_no_token(tmp_path, num_blocks):
    """Chunks cut images. With few blocks, what leaves the device comes back from the host, or is computed again."""
    flags = (*FLAGS, "--num-gpu-blocks-override", str(num_blocks), "--max-num-batched-tokens", "24")
    flags += ("--mtp",) if num_blocks == 36 else ()
    rng = random.Random(24)
    pool = [*map(part, (*SMALL, *BLOCK_SIZED, *LARGE)), *(text("ab" * length) for length in (1, 4, 9))]
    with started(tmp_path, *flags, "--swap-space", "0.05") as server:
        asked = Asked(server, keeps_all=num_blocks == 600)
        prompts = [rng.choices(pool, k=rng.randint(2, 6)) for _ in range(6)]
        for _ in range(24):
            prompt = rng.choice(prompts)
            asked.ask(*prompt[: rng.randint(1, len(prompt))], *rng.choices(pool, k=rng.randint(0, 2)))
        assert asked.num_cached > 500
        assert (server.metrics()["device_evicted_blocks_total"] > 0) == (num_blocks == 36)
        assert server.wait_idle()["ok"]


def test_the_placeholder_alone_is_no_image(server):
    """Token ids of a client may hold placeholders: they are tokens like others, and share nothing with images."""
    asked = text("q" * 14), part(BLOCK_SIZED[0]), text("?")
    ask(server, *asked)
    ids = [t.BOS, t.USER, *b"q" * 14, *[t.IMAGE] * 16, *b"?", t.END, t.ASSISTANT]
    with server.client() as client:
        answer = client.completions.create(model="default", prompt=ids, max_tokens=1, temperature=0)
    assert answer.usage.prompt_tokens == len(ids)
    assert answer.usage.prompt_tokens_details.cached_tokens == BLOCK
