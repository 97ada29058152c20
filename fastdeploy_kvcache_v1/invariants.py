"""What always holds in the prefix tree, written out for the `check()` methods."""

from __future__ import annotations

from collections.abc import Sequence, Set

from .errors import InvariantError
from .metadata import CacheLevel
from .run import Run
from .run_queue import RunQueue


def expect(condition: bool, broken: str) -> None:
    """Raises `InvariantError` with the text `broken` unless `condition`."""
    if not condition:
        raise InvariantError(broken)


def check_runs(runs: Sequence[Run], detached: Set[Run], transfers: Set[Run]) -> None:
    """`runs` is the whole tree, parents before children; `transfers` are the runs with an open copy."""
    for run in runs:
        _check_lists(run)
        _check_place(run)
        expect(not run.detached, "a detached run is findable")
    # Detached runs exist only for their last users.
    for run in detached:
        _check_lists(run)
        expect(run.detached and (run.pins > 0 or run.open is not None), "a detached run has no user left")
        expect(not run.is_queued and not (run.host and run.host.is_queued), "a detached run is queued")
    # A block has one node.
    hashes = [block for run in runs for block in run.hashes]
    expect(len(hashes) == len(set(hashes)), "one block is in the tree twice")
    # Exactly the runs with an open copy are known as such.
    expect(transfers == {run for run in (*runs, *detached) if run.open is not None}, "open transfers and runs disagree")


def check_queue(queues: Sequence[RunQueue], in_tier: Set[Run], tier: str) -> None:
    """The queues of a tier hold its findable runs, each at most once, and miss none that can be evicted."""
    expect(all(queue.check_links() for queue in queues), f"the {tier} queue is torn")
    queued = [run for queue in queues for run in queue]
    expect(len(queued) == len(set(queued)), f"the {tier} queue holds a run twice")
    expect(in_tier >= set(queued), f"the {tier} queue holds runs that are not in its tier")
    missing = in_tier - set(queued)
    expect(all(run.pins for run in missing), f"the {tier} queue misses runs that nobody uses")


def _check_place(run: Run) -> None:
    parent = run.parent
    assert parent is not None
    expect(parent.children.get(run.hashes[0]) is run, "a run is not its parent's child by its first hash")
    # A pinned run has pinned ancestors; a device run has device ancestors.
    expect(run.pins >= sum(child.pins for child in run.children.values()), "a run is pinned less than its children")
    on_device_above = parent.is_root or parent.device is not None
    expect(run.device is None or on_device_above, "a device block hangs below a block that is not on the device")
    expect(run.open is not CacheLevel.DEVICE or run.pins > 0, "a swap-in is open that nobody waits for")


def _check_lists(run: Run) -> None:
    """A run has blocks, is in a tier, and its lists agree in length; an open copy fills a tier it is in."""
    expect(bool(run.hashes), "a run has no blocks")
    expect(run.device is not None or run.host is not None, "a run is in no tier")
    expect(run.device is None or len(run.device) == len(run.hashes), "device slots and hashes differ in number")
    if run.host is not None:
        expect(run.host.run is run, "a host copy belongs to another run")
        expect(len(run.host.slots) == len(run.hashes), "host slots and hashes differ in number")
    expect(run.open is None or run.host is not None, "an open copy has no host slots")
    expect(run.open is not CacheLevel.DEVICE or run.device is not None, "a swap-in has no device slots")
