"""Checksum models of every cache layout through engine, cache and copies, on one rank and on two.

What any order of events does to tokens is the world's (`tests/world`); here is what layouts, drafts and ranks add.
"""

import random
from functools import cache

import pytest

from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime
from tests.lab.server.engine.family_engine import BLOCK, FAMILIES, FamilyEngine

PROMPT = [40 + (7 * at) % 50 for at in range(60)]


def conversations(engine):
    """Outputs of three conversations of three turns that push each other out: a wrong token changes all that follow."""
    rng = random.Random(1)
    system = [rng.randrange(32, 127) for _ in range(20)]
    texts = [system + [rng.randrange(32, 127) for _ in range(rng.randrange(20, 60))] for _ in range(3)]
    outputs = []
    for turn in range(3):
        for index in range(3):
            outputs.append(engine.ask(texts[index], temperature=0.6 if index == 1 else 0.0))
            texts[index] = texts[index] + outputs[-1] + [rng.randrange(32, 127) for _ in range(6 + turn)]
    return outputs


@cache
def without_cache(family):
    engine = FamilyEngine(family, num_device_blocks=60, caching=False)
    outputs = conversations(engine)
    assert engine.counters.device_hit_tokens == 0
    engine.close()
    return outputs


@pytest.mark.parametrize(
    ("family", "mtp", "size"),
    [*((family, number % 2 == 0, 1) for number, family in enumerate(FAMILIES)), ("gqa", False, 2), ("mla", True, 2)],
)
def test_the_cache_changes_no_token(family, mtp, size):
    engine = FamilyEngine(family, mtp=mtp, size=size, num_host_blocks=80)
    assert conversations(engine) == without_cache(family)
    engine.settle()
    counters = engine.counters
    assert counters.device_hit_tokens > 10 * BLOCK
    assert counters.host_hit_tokens > 4 * BLOCK
    for rank, copies in enumerate(engine.core.counters.copies):
        block_bytes = engine.controllers[rank].layout.block_bytes
        assert copies.swap_in.bytes == counters.swap_in_blocks * block_bytes
        assert copies.swap_out.bytes == counters.swap_out_blocks * block_bytes
    assert (engine.drafts[1] > 0) == mtp, "some guesses are right, if there are any"
    engine.close()


@pytest.mark.parametrize("family", ["gqa", "dsa"])
def test_drafts_are_as_good_after_a_swap_in(family):
    """The draft layer's cache came back with the others': the same guesses, and as many of them right."""
    engine = FamilyEngine(family, mtp=True, num_host_blocks=80)
    seen = []
    for _ in range(2):
        before = engine.drafts
        output = engine.ask(PROMPT, max_tokens=60)
        seen.append((output, *(now - then for now, then in zip(engine.drafts, before, strict=True))))
        engine.push_out()
    assert seen[0] == seen[1]
    assert engine.counters.host_hit_tokens >= 50
    assert seen[0][2] > 3, "some were right"
    engine.close()


# ---- two ranks whose copies go differently


class Link:
    """A rank's copies: `fails` says to which stream's, "swap_in" or "swap_out", something happens."""

    fails = "nothing"

    def __call__(self, stream):
        if self.fails in stream:
            raise RuntimeError("torn")


@pytest.fixture
def links():
    return [Link(), Link()]


def cached_on_the_host(links, family="gqa", *, mtp=False):
    """An engine of two ranks, and the answer to `PROMPT`, whose blocks are on the host alone."""
    runtimes = [CpuRuntime(delay=link) for link in links]
    engine = FamilyEngine(family, mtp=mtp, size=2, runtimes=runtimes, num_host_blocks=80)
    expected = engine.ask(PROMPT)
    engine.push_out()
    engine.settle()
    return engine, expected


def loaded(engine):
    """Blocks that came from the host, and failed copies, by rank."""
    copies = [rank.swap_in for rank in engine.core.counters.copies]
    return [each.blocks for each in copies], [each.failures for each in copies]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(("family", "mtp"), [("gqa", True), ("mla", False)])
def test_a_swap_in_that_fails_on_one_rank_has_failed_on_all(links, family, mtp, failing):
    engine, expected = cached_on_the_host(links, family, mtp=mtp)
    before = loaded(engine)[1]
    links[failing].fails = "swap_in"
    recorder = engine.submit("again", PROMPT, 10, SamplingParams(temperature=0.0))
    results = engine.results()
    assert [list(result.retry) for result in results] == [["again"], ["again"]], "both ranks say so, in the same step"
    assert [result.tokens for result in results] == [{}, {}]
    assert all(f"rank {failing}: " in result.retry["again"] for result in results)
    links[failing].fails = "nothing"
    while not recorder.ended:
        engine.step()
    assert recorder.tokens == expected
    engine.settle()
    failures = [now - then for now, then in zip(loaded(engine)[1], before, strict=True)]
    assert failures == [failing == 0, failing == 1]
    engine.close()


@pytest.mark.parametrize("broken", [0, 1])
def test_a_rank_that_cannot_compute_costs_the_requests_of_that_step_only(links, broken):
    engine, expected = cached_on_the_host(links)
    runner = engine.runners[broken]
    forward = runner._forward

    def fail_once(sequences, caches, before_layer):
        runner._forward = forward
        raise MemoryError("no room")

    runner._forward = fail_once
    recorder = engine.submit("unlucky", PROMPT[:20], 4)
    assert [list(result.errors) for result in engine.results()] == [["unlucky"]] * 2, "on every rank"
    assert f"rank {broken}: MemoryError('no room')" in recorder.failure.message
    assert engine.ask(PROMPT) == expected
    engine.close()
