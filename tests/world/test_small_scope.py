"""All orders of events of two requests, two ranks and a few blocks, and random walks that go deeper.

`python -m tests.world.small_scope --depth N` searches deeper.
"""

import inspect
import sys
import textwrap

import pytest

from fastdeploy_kvcache_v1.scheduler.block_pool import BlockPool
from fastdeploy_kvcache_v1.scheduler.copies_by_step import CopiedRun
from fastdeploy_kvcache_v1.scheduler.radix_tree import RadixTree
from fastdeploy_kvcache_v1.scheduler.residency import Residency

from .small_scope import SCOPES, search, walk

BROKEN = {
    # change: start of the search, method, old text, new text
    "only the leaf is pinned": ("computed", RadixTree.match, "for run in path:", "for run in path[-1:]:"),
    "a slot is evicted while a copy fills it": ("both grow", Residency._is_host_victim, "and run.open is None", ""),
    "a reset forgets readers": ("stored", BlockPool.keep_only, "in self._readers:\n        is", "in ():\n        is"),
    "a block is stored twice": ("walk", CopiedRun.take, "wanted.remove(slot)", "pass"),
    "a block on its way to the host is matched": (
        "evicted",
        RadixTree._find,
        "if child is None or (not child.on_device and child.open is not None):",
        "if child is None:",
    ),
}
"""Mutants that test the search itself: each breaks one kind of law."""


@pytest.mark.parametrize("begin", SCOPES)
def test_no_order_of_events_breaks_a_law(begin):
    assert search(*SCOPES[begin])[0] > 30


@pytest.mark.parametrize("tens", range(10))
def test_no_walk_breaks_a_law(tens):
    for seed in range(10 * tens, 10 * tens + 10):
        walk(seed, 120)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_manager_is_found(name, monkeypatch):
    begin, method, was, now = BROKEN[name]
    source = textwrap.dedent(inspect.getsource(method))
    assert source.count(was) == 1
    module, made = sys.modules[method.__module__], {}
    exec("from __future__ import annotations\n" + source.replace(was, now), vars(module), made)
    owner = getattr(module, method.__qualname__.split(".")[0])
    monkeypatch.setattr(owner, method.__name__, made[method.__name__])
    with pytest.raises(AssertionError, match="after: "):
        search(*SCOPES[begin]) if begin in SCOPES else walk(22, 120)
