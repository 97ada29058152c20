"""Managers of these tests may name the policies of `other_policies.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy_kvcache_v1.scheduler.policies.tables import EVICTION_POLICIES
from fastdeploy_kvcache_v1.scheduler.reuse import ages, history, judge, rates

from .other_policies import OTHER_POLICIES


@pytest.fixture(autouse=True, scope="package")
def other_policies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, policy in OTHER_POLICIES.items():
            patch.setitem(EVICTION_POLICIES, name, policy)
        yield


@pytest.fixture(autouse=True, scope="package")
def fast_learning() -> Iterator[None]:
    """What a server learns in thousands of requests, these tests learn in some."""
    age_classes = rates.age_classes(young_bits=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "REQUESTS_PER_REFRESH", 4)
        patch.setattr(judge, "SHORTEST", 1)
        patch.setattr(rates, "AGE_CLASSES", age_classes)
        patch.setattr(rates, "AGE_WIDTHS", rates.age_widths(young_bits=2))
        patch.setattr(history, "AGE_CLASSES", age_classes)
        patch.setattr(ages, "FIRST_SPAN", 1)
        yield
