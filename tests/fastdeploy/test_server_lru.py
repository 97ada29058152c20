"""Both tiers of the real server evict the least recently used block, a prompt's last one first: seen from outside, by
how many cached blocks each request finds in which tier.

A prompt is a word, one letter per block of 64 tokens: "Aa" and "Ab" share their first block. While a request runs it
holds one device block more, which is free again afterwards. Requests come one at a time.
"""

import random
from collections import Counter

import pytest

from .cpu_server import BLOCK_SIZE, started, wait_until
from .lru_reference import LruReference
from .server_workload import user

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(600)]

DEVICE_BLOCKS = 9
HOST_BLOCKS = 12
BLOCK_BYTES = 2 * 4 * 2 * 16 * BLOCK_SIZE * 2
"""As FastDeploy counts: key and value, layers, heads, head size, tokens, bf16."""

FLAGS = ("--num-gpu-blocks-override", str(DEVICE_BLOCKS), "--max-model-len", "448", "--max-num-batched-tokens", "448")
HOST_TIER = ("--swap-space", str((HOST_BLOCKS + 0.5) * BLOCK_BYTES / 2**30), "--write-policy", "write_through")


LENGTH_OF_END = 12


def messages(prompt):
    """Exactly its blocks, then the end: the template has one token before the text and two behind it."""
    text = "".join("".join(random.Random(letter).choices("abcdefghij ", k=BLOCK_SIZE)) for letter in prompt)
    return user(text[1:] + "." * (LENGTH_OF_END - 2))


class Observed:
    """A server whose every answer is compared with the reference's and with that of an empty cache."""

    def __init__(self, server, client, host_blocks):
        self._server, self._client = server, client
        self.reference = LruReference(DEVICE_BLOCKS, host_blocks)
        self._cold = {}
        self._num_tokens = 0
        self._hits = self._before = Counter()

    def start(self, prompts):
        """Learn the answers of a cache that is empty for each of `prompts`; it is empty afterwards, too."""
        for prompt in prompts:
            self._forget()
            self._cold[prompt] = self._answer(prompt)
            assert self._cold[prompt].cached_tokens == 0
        self._forget()
        self._hits = self._read_hits(self._wait_until_over())
        self._before = self._read_counts()

    def ask(self, prompt):
        """Returns how many of its blocks were in any tier."""
        expected = self.reference.ask(prompt)
        answer = self._answer(prompt)
        before, self._hits = self._hits, self._read_hits(self._wait_until_over())
        found = tuple((self._hits[tier] - before[tier]) // BLOCK_SIZE for tier in ("gpu", "cpu"))
        assert (prompt, found, answer.cached_tokens) == (prompt, expected, BLOCK_SIZE * sum(expected))
        assert answer.tokens == self._cold[prompt].tokens
        return sum(found)

    def _answer(self, prompt):
        answer = self._server.ask(self._client, messages(prompt), max_tokens=4)
        self._num_tokens += BLOCK_SIZE * len(prompt) + LENGTH_OF_END
        return answer

    def _wait_until_over(self):
        """The answer comes before the request gives its blocks back. Our metrics follow now and then: wait for those
        of a moment after it was scheduled, then for those of a moment when nothing ran. Returns the latter.
        """
        wait_until(lambda: self._server.metrics()["query_tokens_total"] == self._num_tokens, "the request's tokens")
        latest = {}

        def is_idle():
            latest.update(self._server.metrics())
            return latest["device_free_blocks"] + latest["device_evictable_blocks"] == DEVICE_BLOCKS

        wait_until(is_idle, "the request to be over")
        return latest

    def _forget(self):
        self._server.control("pause")
        self._server.control("resume")
        self.reference.forget()

    @staticmethod
    def _read_hits(metrics):
        """Cached tokens so far, by tier, as FastDeploy counts them."""
        return {tier: int(metrics[f"prefix_{tier}_cache_token_num_total"]) for tier in ("gpu", "cpu")}

    def _read_counts(self):
        metrics, copies = self._server.metrics(), self._server.worker_copies()
        copies = Counter(copied_in=copies.swap_in.blocks, copied_out=copies.swap_out.blocks)
        return copies + Counter({name: int(metrics[f"{name}_blocks_total"]) for name in self.reference.counts})

    def check_counts(self):
        """Not a block more was evicted or copied than had to be. Copies of the last request's blocks still wait."""
        counts = self.reference.counts
        expected = {**counts, "copied_in": counts["swap_in"], "copied_out": counts["swap_out"]}

        def since_start():
            now = self._read_counts()
            return {name: now[name] - self._before[name] for name in expected}

        wait_until(lambda: sum(since_start().values()) >= sum(expected.values()), "the counters")
        assert since_start() == expected


@pytest.mark.parametrize("host_blocks", [0, HOST_BLOCKS])
def test_random_prompts_find_what_the_reference_keeps(release, tmp_path, host_blocks):
    """Ones that share beginnings of any length, some asked more often."""
    chosen = random.Random(7)
    words = sorted(
        {"".join(chosen.choices("ABC")[:1] + chosen.choices("12", k=chosen.randrange(5))) for _ in range(24)}
    )
    flags = FLAGS + (HOST_TIER if host_blocks else ())
    with started(release, tmp_path, *flags) as server, server.client() as client:
        wait_until(lambda: server.metrics()["device_free_blocks"] == DEVICE_BLOCKS, "the metrics")
        assert server.metrics()["host_blocks"] == host_blocks
        cache = Observed(server, client, host_blocks)
        cache.start(words)
        found = [cache.ask(prompt) for prompt in chosen.choices(words, weights=range(1, len(words) + 1), k=80)]
        assert cache.reference.counts["device_evicted"] > 60
        assert set(found) >= {0, 1, 2, 3, 4}
        cache.check_counts()
        assert server.stop() == 0, server.stderr
