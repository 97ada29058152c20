"""Requests with other salts, or without access to the cache, through engine and storage: nothing crosses."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import CacheAccess
from tests.lab.server.engine.storage_server import HostTierServer
from tests.lab.server.engine.test_engine_storage import PROMPT
from tests.lab.server.engine.test_scheduler import tokens_of
from tests.lab.server.harness import Harness, expected_outputs

BLOCK = 4
NO_READS, NO_WRITES, NOTHING = CacheAccess(reads=False), CacheAccess(writes=False), CacheAccess(False, False)


def make(*, device=200, host=0, **options):
    return Harness(KVCacheConfig(device, host, BLOCK, shared_prefill_tokens=1), **options)


def test_equal_prompts_of_two_tenants_in_one_batch_are_both_computed():
    """Sharing a prefill tells one tenant that the other one has sent the same prompt."""
    harness, prompt = make(max_num_batched_tokens=256), list(range(40))
    salts = (b"a", b"b", b"", b"a")
    recorders = [harness.submit(str(index), prompt, 2, salt=salt) for index, salt in enumerate(salts)]
    assert tokens_of(harness.step()) == [("0", 40), ("1", 40), ("2", 40)], "the second request of tenant a waits"
    harness.run()
    assert [recorder.tokens for recorder in recorders] == [expected_outputs(prompt, 2)] * 4
    assert [recorder.cached for recorder in recorders] == [0, 0, 0, 36]


def test_no_request_waits_for_one_without_writes_or_waits_without_reads():
    harness, prompt = make(max_num_batched_tokens=256), list(range(40))
    for name, access in (("no-writes", NO_WRITES), ("other", CacheAccess()), ("no-reads", NO_READS)):
        harness.submit(name, prompt, 1, access=access)
    assert tokens_of(harness.step()) == [("no-writes", 40), ("other", 40), ("no-reads", 40)]
    harness.run()


@pytest.mark.parametrize(
    ("access", "cached", "left"), [(NO_READS, 0, 40), (NO_WRITES, 16, 16), (NOTHING, 0, 16), (CacheAccess(), 16, 40)]
)
def test_what_a_request_finds_and_what_it_leaves(access, cached, left):
    harness, prompt = make(max_num_batched_tokens=256), list(range(44))
    for name, tokens, limit in (("before", prompt[:17], CacheAccess()), ("limited", prompt, access)):
        recorder = harness.submit(name, tokens, 2, access=limit)
        harness.run()
        assert recorder.tokens == expected_outputs(tokens, 2)
    assert recorder.cached == cached
    after = harness.submit("after", prompt, 2)
    harness.run()
    assert after.tokens == expected_outputs(prompt, 2)
    assert after.cached == left


@pytest.mark.parametrize(("access", "queries", "loads"), [(NO_READS, 0, 0), (NO_WRITES, 1, 7), (NOTHING, 0, 0)])
def test_storage_is_asked_only_for_requests_that_read(access, queries, loads):
    first = HostTierServer()
    first.ask("first", PROMPT)
    second = HostTierServer(stored=first.store.values)
    assert second.ask("second", PROMPT, access=access) == 4 * loads
    counters = second.tier.counters
    assert (counters.queries, counters.load.blocks) == (queries, loads)


@pytest.mark.parametrize(("access", "stored"), [(NO_READS, 7), (NO_WRITES, 0), (NOTHING, 0)])
def test_only_what_a_request_writes_is_stored(access, stored):
    server = HostTierServer()
    server.ask("first", PROMPT, access=access)
    assert len(server.store.values) == stored
