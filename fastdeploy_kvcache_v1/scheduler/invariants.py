"""Invariants of the prefix tree, for the `check()` methods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from ..contract.messages import CacheLevel
from ..errors import InvariantError
from .run import WIDTH, QueueNode, Run, RunQueue


def expect(condition: bool, broken: str) -> None:
    """Raise `InvariantError(broken)` unless `condition`."""
    if not condition:
        raise InvariantError(broken)


def check_runs(runs: Sequence[Run], detached: Set[Run], transfers: Set[Run]) -> None:
    """Check all runs: `runs` is the whole tree, parents before children; `transfers` are the runs with an open copy."""
    for run in runs:
        _check_tiers(run)
        _check_place(run)
        expect(not run.detached, "a detached run is findable")
    for run in detached:
        _check_tiers(run)
        expect(run.detached and (run.pins > 0 or run.open is not None), "a detached run has no user left")
        expect(not run.is_queued and not (run.host and run.host.is_queued), "a detached run is queued")
    _check_cells(runs, detached)
    hashes = [block for run in runs for block in run.hashes]
    expect(len(hashes) == len(set(hashes)), "one block is in the tree twice")
    expect(transfers == {run for run in (*runs, *detached) if run.open is not None}, "open transfers and runs disagree")


def check_queue(queues: Sequence[RunQueue], places: Mapping[Run, QueueNode], waiting: Set[Run], tier: str) -> None:
    """Check that each run of a tier is in its queues at most once, and that no run that could be evicted is missing.

    `places`: the places of the findable runs of the tier. `waiting`: runs that cannot leave before runs below them.
    """
    expect(all(queue.check_links() for queue in queues), f"the {tier} queue is torn")
    queued = [run for queue in queues for run in queue]
    expect(len(queued) == len(set(queued)), f"the {tier} queue holds a run twice")
    expect(places.keys() >= set(queued), f"the {tier} queue holds runs that are not in its tier")
    for run in places.keys() - set(queued):
        expect(not places[run].is_queued, f"a run of the {tier} tier is in a queue of another tier")
        expect(run.pins > 0 or run in waiting, f"the {tier} queue misses runs that could be evicted")


def _check_place(run: Run) -> None:
    parent = run.parent
    assert parent is not None
    expect(parent.children.get(run.first_hash) is run, "a run is not its parent's child by its first hash")
    num_on_device = sum(child.on_device for child in run.children.values())
    expect(num_on_device == run.num_device_children, "a run miscounts its children on the device")
    # A request pins and hits all ancestors too, and a run on the device has all ancestors there.
    expect(run.pins >= sum(child.pins for child in run.children.values()), "a run is pinned less than its children")
    on_device_above = parent.is_root or parent.on_device
    expect(not run.on_device or on_device_above, "a device block hangs below a block that is not on the device")
    expect(parent.is_root or run.hits <= parent.hits, "a run is hit more often than the one above it")


def _check_tiers(run: Run) -> None:
    """Check that a run has blocks and a tier, and that an open copy fills one of its tiers."""
    expect(run.length > 0, "a run has no blocks")
    expect(run.on_device or run.host is not None, "a run is in no tier")
    expect(run.host is None or run.host.run is run, "a host copy belongs to another run")
    expect(run.open is None or run.host is not None, "an open copy has no host slots")
    expect(run.open is not CacheLevel.DEVICE or run.on_device, "a swap-in has no device slots")


def _check_cells(runs: Sequence[Run], detached: Set[Run]) -> None:
    """Check that each block of a list of cells belongs to one run, and that its ranges follow each other downwards."""
    cut_off = {id(run.cells) for run in detached}
    lengths: dict[int, int] = {}
    for run in runs:
        lengths[id(run.cells)] = lengths.get(id(run.cells), 0) + run.length
        above = run.parent
        follows = above is not None and above.cells is run.cells and above.end == run.start
        expect(follows or not run.start, "the cells of a run do not go on from its parent's")
    for run in runs:
        whole = lengths[id(run.cells)] * WIDTH == len(run.cells)
        expect(whole or id(run.cells) in cut_off, "cells have blocks that belong to no run, or to two")
