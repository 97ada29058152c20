"""Both tiers of the real server evict the least recently used block, a prompt's last one first: seen from outside, by
how many cached blocks each request finds in which tier.

A prompt is a word, one letter per block of 64 tokens: "Aa" and "Ab" share their first block. While a request runs it
holds one device block more, which is free again afterwards. Requests come one at a time.
"""

import random
from collections import Counter

import pytest

from .cpu_server import BLOCK_SIZE, started, wait_until
from .fastdeploy_trees import RELEASES, tree
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
        for prompt in sorted(set(prompts.split()) - self._cold.keys()):
            self._forget()
            self._cold[prompt] = self._answer(prompt)
            assert self._cold[prompt].cached_tokens == 0
        self._forget()
        self._hits = self._read_hits(self._wait_until_over())
        self._before = self._read_counts()

    def found(self, prompts):
        """Ask for each of `prompts`; how many of its blocks were in any tier."""
        return [sum(pair) for pair in self.found_in(prompts)]

    def found_in(self, prompts):
        """Ask for each of `prompts`; how many of its blocks were (on the device, on the host only)."""
        return [self._ask(prompt) for prompt in prompts.split()]

    def _ask(self, prompt):
        expected = self.reference.ask(prompt)
        answer = self._answer(prompt)
        before, self._hits = self._hits, self._read_hits(self._wait_until_over())
        found = tuple((self._hits[tier] - before[tier]) // BLOCK_SIZE for tier in ("gpu", "cpu"))
        assert (prompt, found, answer.cached_tokens) == (prompt, expected, BLOCK_SIZE * sum(expected))
        assert answer.tokens == self._cold[prompt].tokens
        return found

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


@pytest.fixture(scope="module")
def server(request, tmp_path_factory):
    release, host_blocks = request.param
    tree(release)  # or skip
    flags = FLAGS + (HOST_TIER if host_blocks else ())
    with started(release, tmp_path_factory.mktemp("server"), *flags) as running, running.client() as client:
        wait_until(lambda: running.metrics()["device_free_blocks"] == DEVICE_BLOCKS, "the metrics")
        assert running.metrics()["host_blocks"] == host_blocks
        yield Observed(running, client, host_blocks)
        assert running.stop() == 0, running.stderr


@pytest.fixture
def cache(server):
    yield server
    server.check_counts()


def tiers(*host_blocks):
    """Runs a test with a server of each release, the one that the tests before used if there is one."""
    servers = [(release, blocks) for release in RELEASES for blocks in host_blocks]
    return pytest.mark.parametrize("server", servers, indirect=True, ids=lambda each: f"{each[0]}-{each[1]}")


device_tier, both_tiers = tiers(0), tiers(HOST_BLOCKS)


@device_tier
def test_the_least_recently_used_prompt_goes_first(cache):
    cache.start("A1 B1 C1 D1 E1 F1")
    assert cache.found("A1 B1 C1 D1") == [0, 0, 0, 0]  # 8 blocks of 9
    assert cache.found("A1") == [2]
    assert cache.found("E1 F1") == [0, 0]  # each needs 3 blocks and 1 is free: B1 goes, then C1
    assert cache.found("D1 A1 E1 F1") == [2, 2, 2, 2]  # asking for what is there evicts nothing
    assert cache.found("B1 C1") == [0, 0]  # now D1 goes, then A1
    assert cache.found("E1 F1 B1 C1") == [2, 2, 2, 2]
    assert cache.found("D1 A1") == [0, 0]


@device_tier
@pytest.mark.parametrize(
    ("others", "kept", "kept_of_first"),
    [("B1234", 3, 4), ("B12345", 2, 4), ("B123 C12", 1, 1), ("B123 C123", 0, 0)],
)
def test_a_prompt_loses_its_last_blocks_first(cache, others, kept, kept_of_first):
    """The last of `others` needs more blocks than are free: A123 pays, and later takes them from the first."""
    cache.start(f"A123 {others}")
    assert cache.found(f"A123 {others}") == [0] * (1 + len(others.split()))
    assert cache.found("A123") == [kept]
    assert cache.found(others.split()[0]) == [kept_of_first]


@device_tier
def test_a_shared_prefix_is_as_young_as_its_last_use(cache):
    cache.start("P1a P1b P1c C1 D1 E1")
    assert cache.found("P1a P1b C1") == [0, 2, 0]
    assert cache.found("P1b") == [3]  # from old to young: a, C1, b, P1
    assert cache.found("D1 E1") == [0, 0]  # 1 block is free after D1, so E1 takes two: a, and the end of C1
    assert cache.found("P1b") == [3]
    assert cache.found("P1c P1a") == [2, 2]  # one block each: the rest of C1, the end of D1
    assert cache.found("C1") == [0]  # takes the rest of D1, and the end of E1
    assert cache.found("E1") == [1]  # takes b, the oldest one below P1
    assert cache.found("P1b P1c") == [2, 2]  # take c, then a
    assert cache.found("C1") == [2]


@both_tiers
def test_what_leaves_the_device_is_on_the_host_until_it_is_the_oldest_there(cache):
    cache.start("A1 B1 C1 D1 E1 F1 G1")
    assert cache.found_in("A1 B1 C1 D1 E1 F1") == [(0, 0)] * 6  # on the device: C1 to F1; the host is full
    assert cache.found_in("A1") == [(0, 2)]  # C1 leaves the device
    assert cache.found_in("G1") == [(0, 0)]  # D1 leaves the device, B1 the host
    assert cache.found_in("D1 C1") == [(0, 2), (0, 2)]  # E1, then F1 leave the device
    assert cache.found_in("A1 G1") == [(2, 0), (2, 0)]
    assert cache.found_in("B1") == [(0, 0)]  # D1 leaves the device, E1 the host
    assert cache.found_in("E1") == [(0, 0)]  # C1 leaves the device, F1 the host
    assert cache.found_in("D1 C1") == [(0, 2), (0, 2)]
    assert cache.found_in("F1") == [(0, 0)]


@both_tiers
def test_a_prompt_may_be_in_both_tiers_and_loses_its_last_blocks_first_in_each(cache):
    cache.start("A123 B1 C1 D1 E12")
    assert cache.found_in("A123 B1 C1 D1") == [(0, 0)] * 4  # 10 host blocks; D1 took two of A123 from the device
    assert cache.found_in("A123") == [(2, 2)]  # takes B1 from the device
    assert cache.found_in("E12") == [(0, 0)]  # takes C1 and the end of D1 from the device, the end of B1 from the host
    assert cache.found_in("B1") == [(0, 1)]  # takes the rest of D1 from the device, the end of C1 from the host
    assert cache.found_in("C1 D1") == [(0, 1), (0, 1)]  # they take the ends of D1 and A123 from the host
    assert cache.found_in("A123") == [(0, 3)]  # takes the end of E12 from the host
    assert cache.found_in("E12") == [(0, 2)]


@tiers(0, HOST_BLOCKS)
def test_random_prompts(cache):
    """Ones that share beginnings of any length, some asked more often: the reference knows what each has to find."""
    chosen = random.Random(7)
    words = sorted(
        {"".join(chosen.choices("ABC")[:1] + chosen.choices("12", k=chosen.randrange(5))) for _ in range(24)}
    )
    cache.start(" ".join(words))
    found = cache.found_in(" ".join(chosen.choices(words, weights=range(1, len(words) + 1), k=80)))
    assert cache.reference.counts["device_evicted"] > 60
    assert {sum(pair) for pair in found} >= {0, 1, 2, 3, 4}
