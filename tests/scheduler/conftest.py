"""Managers of these tests may name the policies of `other_policies.py`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy_kvcache_v1.scheduler.policies.tables import EVICTION_POLICIES

from .other_policies import OTHER_POLICIES


@pytest.fixture(autouse=True, scope="session")
def other_policies() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, policy in OTHER_POLICIES.items():
            patch.setitem(EVICTION_POLICIES, name, policy)
        yield
