"""The clairvoyant bound: what the best of all possible caches hits, found by trying them all."""

import random
from itertools import combinations

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.replay.clairvoyant import Clairvoyant
from fastdeploy_kvcache_v1.lab.replay.driver import Replay, ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.trace import TraceRequest, read_trace


def request(line: int, *ids: int, more: int = 0, outputs: tuple[int, ...] = ()) -> TraceRequest:
    """Blocks of 64 tokens, one id each, and some tokens more without an id; outputs fill their blocks."""
    output_length = 64 * len(outputs) + 1 - more
    return TraceRequest(
        line=line,
        input_length=64 * len(ids) + more,
        output_length=output_length,
        hash_ids=ids,
        tokens_per_id=64,
        output_hash_ids=outputs,
    )


def random_requests(seed: int, count: int, *, outputs: bool) -> list[TraceRequest]:
    """Paths of up to four blocks in a tree with two branches everywhere; half of them end with a whole block. The last
    blocks of some are outputs.
    """
    rng = random.Random(seed)
    requests = []
    for line in range(1, count + 1):
        choices = [rng.randrange(2) for _ in range(rng.randint(1, 4))]
        ids = tuple(int("1" + "".join(map(str, choices[: depth + 1])), 2) for depth in range(len(choices)))
        num_prompt = rng.randint(1, len(ids)) if outputs else len(ids)
        more = rng.choice((0, 20)) if num_prompt == len(ids) else rng.choice((0, 1))
        requests.append(request(line, *ids[:num_prompt], more=more, outputs=ids[num_prompt:]))
    return requests


def best(requests: list[TraceRequest], capacity: int) -> int:
    """Hits of the best cache: after each request it keeps any `capacity` of its blocks and the request's."""
    hits_by_content = {frozenset(): 0}
    for each in requests:
        reached: dict[frozenset[int], int] = {}
        for content, hits in hits_by_content.items():
            found = 0
            for block in each.hash_ids[: (each.input_length - 1) // 64]:
                if block not in content:
                    break
                found += 1
            there = content | set(each.hash_ids + each.output_hash_ids)
            for kept in combinations(sorted(there), min(capacity, len(there))):
                reached[frozenset(kept)] = max(reached.get(frozenset(kept), 0), hits + found)
        hits_by_content = reached
    return max(hits_by_content.values())


@pytest.mark.parametrize("capacity", [0, 1, 2, 3, 5])
@pytest.mark.parametrize("outputs", [False, True])
@pytest.mark.parametrize("seed", range(12))
def test_no_cache_of_this_size_hits_more_and_one_hits_as_much(seed, capacity, outputs):
    requests = random_requests(seed, 7, outputs=outputs)
    assert Clairvoyant(requests, 64, outputs=outputs).hits(capacity) == best(requests, capacity)


@pytest.mark.parametrize(("window", "outputs"), [(1, False), (32, False), (1, True)])
@pytest.mark.parametrize("capacity", [60, 200, 600, 3_000, 100_000])
def test_no_replay_hits_more_and_one_that_forgets_nothing_hits_as_much(synthetic_trace, capacity, window, outputs):
    requests = [each for each in read_trace(synthetic_trace) if each.input_length <= 64 * capacity]
    replay = Replay(ReplayOptions(KVCacheConfig(capacity, max_queued_events=0), window, outputs=outputs))
    replay.run(iter(requests))
    assert len(requests) == len(replay.request_seconds)
    bound = 64 * Clairvoyant(requests, 64, outputs=outputs).hits(capacity)
    assert replay.num_device_hit_tokens <= bound
    if capacity == 100_000 and window == 1:
        assert replay.num_device_hit_tokens == bound > 0
        assert not outputs or bound > 64 * Clairvoyant(requests, 64).hits(capacity)
    if capacity == 200:
        assert replay.num_device_hit_tokens < 0.95 * bound
