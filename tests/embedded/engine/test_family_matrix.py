"""Every attention family through engine, cache and copies, on one rank and on two: the same tokens as without a cache.

A part of the matrix runs always, all of it with FASTDEPLOY_KVCACHE_WHOLE_MATRIX=1.
"""

import os
from functools import cache

import pytest

from fastdeploy_kvcache_v1.config import WritePolicy
from tests.embedded.engine.family_engine import BLOCK, FAMILIES, FamilyEngine, conversations

DEVICE_ONLY = "device only"
TIERS = (DEVICE_ONLY, *(policy.value for policy in WritePolicy))
SIZES = (1, 2)
"""Tensor-parallel ranks."""
ALL = [(family, tier, mtp, size) for family in FAMILIES for tier in TIERS for mtp in (False, True) for size in SIZES]
WHOLE = os.environ.get("FASTDEPLOY_KVCACHE_WHOLE_MATRIX") == "1"


def is_in_the_thin_matrix(family, tier, mtp, size):
    """On one rank each family with each tier, each of them with drafts at least once, and grouped queries with
    everything. On two every other family with a tier.
    """
    number = list(FAMILIES).index(family) + TIERS.index(tier)
    if size > 1:
        return number % 2 == 0 and mtp == (number % 4 == 0)
    return family == "gqa" or mtp == (number % 2 == 1)


CASES = [case for case in ALL if WHOLE or is_in_the_thin_matrix(*case)]


@cache
def without_cache(family):
    engine = FamilyEngine(family, mtp=False, num_device_blocks=60, caching=False)
    outputs = conversations(engine)
    assert engine.counters.device_hit_tokens == 0
    engine.close()
    return outputs


def engine_of(family, tier, mtp, size, **options):
    if tier == DEVICE_ONLY:
        return FamilyEngine(family, mtp=mtp, size=size, num_device_blocks=60, **options)
    return FamilyEngine(family, mtp=mtp, size=size, policy=WritePolicy(tier), num_host_blocks=80, **options)


def test_the_thinned_matrix_has_everything_once():
    for size in SIZES:
        cases = [case for case in CASES if case[3] == size]
        for position, values in enumerate((FAMILIES, TIERS, (False, True))):
            assert {case[position] for case in cases} == set(values)
    assert {case[:2] for case in CASES if case[3] == 1} == {case[:2] for case in ALL}


@pytest.mark.parametrize(("family", "tier", "mtp", "size"), CASES)
def test_the_cache_changes_no_token(family, tier, mtp, size):
    engine = engine_of(family, tier, mtp, size)
    assert conversations(engine) == without_cache(family)
    engine.settle()
    counters = engine.counters
    assert counters.device_hit_tokens > 10 * BLOCK
    if tier != DEVICE_ONLY:
        assert counters.host_hit_tokens > 4 * BLOCK
        for rank, copies in enumerate(engine.harness.core.counters.copies):
            block_bytes = engine.controllers[rank].layout.block_bytes
            assert copies.swap_in.bytes == counters.swap_in_blocks * block_bytes
            copies_out = rank == 0 or not engine.shares_host
            assert copies.swap_out.bytes == counters.swap_out_blocks * block_bytes * copies_out
        assert len(engine.harness.core.counters.copies) == size
    assert (engine.drafts[1] > 0) == mtp, "some guesses are right, if there are any"
    engine.close()


def push_out(engine, rounds=4):
    """Other prompts take the device tier."""
    for number in range(rounds):
        engine.ask([50 + number] * 60, max_tokens=1)


@pytest.mark.parametrize("family", ["gqa", "mla", "dsa"])
def test_drafts_are_as_good_after_a_swap_in(family):
    """The draft layer's cache came back with the others': the same guesses, and as many of them right."""
    prompt = [40 + (7 * at) % 50 for at in range(100)]
    engine = FamilyEngine(family, mtp=True, num_host_blocks=80)
    seen = []
    for _ in range(2):
        before = engine.drafts
        output = engine.ask(prompt, max_tokens=60)
        seen.append((output, tuple(now - then for now, then in zip(engine.drafts, before, strict=True))))
        push_out(engine)
    assert seen[0] == seen[1]
    assert engine.counters.host_hit_tokens >= 90
    assert seen[0][1][1] > 3, "some were right"
    engine.close()


@pytest.mark.parametrize("family", ["gqa", "mla"])
def test_a_draft_cache_that_did_not_come_back_shows_in_the_drafts_only(family):
    """So the test before this one can fail, and drafts cannot change a token."""
    prompt = [40 + (7 * at) % 50 for at in range(100)]
    engine = FamilyEngine(family, mtp=True, num_host_blocks=80)
    expected = engine.ask(prompt, max_tokens=60)
    before = engine.drafts
    push_out(engine)
    engine.settle()
    for rows in engine.controller.host_pool.layers[-1]:
        for slot in range(80):
            engine.controller.host_pool.block(slot)[-rows.row_bytes * len(engine.controller.host_pool.layers[-1]) :] = 0
    after_push = engine.drafts
    assert engine.ask(prompt, max_tokens=60) == expected
    assert tuple(now - then for now, then in zip(engine.drafts, after_push, strict=True)) != before
    engine.close()
