"""Claims: whose told times of return decide, and for how long they are remembered."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.scheduler.cache_stats import Counters
from fastdeploy_kvcache_v1.scheduler.reuse import claims as module
from fastdeploy_kvcache_v1.scheduler.reuse.claims import GRACE, REMEMBERED, Claims


def claims(*counts: tuple[bytes, int, int]) -> Claims:
    it = Claims(Counters())
    for count in counts:
        it.count(*count)
    return it


def test_tenant_is_believed_until_more_wrong_claims_than_the_grace() -> None:
    assert claims().believes(b"a")
    assert claims((b"a", GRACE, GRACE)).believes(b"a")
    assert not claims((b"a", GRACE + 1, GRACE + 1)).believes(b"a")


def test_tenant_is_believed_while_half_of_its_claims_hold() -> None:
    assert claims((b"a", 100, 50)).believes(b"a")
    assert not claims((b"a", 100, 51)).believes(b"a")


def test_wrong_claims_of_a_tenant_do_not_concern_another_one() -> None:
    it = claims((b"liar", 50, 50))
    assert it.believes(b"")
    assert it.believes(b"a")


def test_tenant_that_has_become_honest_is_believed_again() -> None:
    it = claims((b"a", REMEMBERED, REMEMBERED))
    right = 0
    while not it.believes(b"a"):
        it.count(b"a", 1, 0)
        right += 1
    assert right < REMEMBERED, "what it claimed first counts half by then"


def test_tenant_that_lies_after_long_honesty_is_not_believed_soon() -> None:
    it = claims(*[(b"a", 1, 0)] * 5 * REMEMBERED)
    wrong = 0
    while it.believes(b"a"):
        it.count(b"a", 1, 1)
        wrong += 1
    assert wrong < 2 * REMEMBERED


def test_tenants_are_bounded_and_the_one_counted_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_TENANTS", 2)
    it = claims((b"a", 9, 9), (b"b", 9, 9), (b"a", 1, 1), (b"c", 9, 9))
    assert [tenant for tenant in (b"a", b"b", b"c") if not it.believes(tenant)] == [b"a", b"c"]


def test_wrong_claims_are_counted_for_all_tenants() -> None:
    counters = Counters()
    it = Claims(counters)
    for tenant in (b"a", b"b"):
        it.count(tenant, 3, 2)
    assert counters.wrong_told_returns == 4
