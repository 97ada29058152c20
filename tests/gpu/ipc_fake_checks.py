"""GPUs that do not reach each other, and what the fake driver holds against peers: no GPU can be asked that.

tests/transfer/test_cuda_ipc_plane.py runs them over the fake driver.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing

import ipc_checks
from cupy import driver
from ipc_checks import WORLD
from plane_contract import CANARY, SECONDS, WIDTHS, content, everything, expect, soon

from fastdeploy_kvcache_v1.errors import PeerRefusedError
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans

library = driver.library
OWN, OTHER = 1, 7
"""Names of GPUs."""


def a_gpu_without_peer_access_is_refused() -> None:
    with WORLD.own_peer() as peer:
        peer.address = peer.ask("be_gpu", OTHER)
        for other, reaches, part in ((OTHER, 0, "does not reach the memory of GPU-0707"), (0, 0, "cannot be mapped")):
            with WORLD.ours() as mine:
                library.fake_gpus(OWN, other, reaches)
                expect(PeerRefusedError, part, mine.open, peer)
                assert library.fake_num_mapped() == 0
        for other in (OTHER, 0):  # one that is not seen may be reached all the same
            library.fake_gpus(OWN, other, 1)
            with WORLD.ours() as mine, closing(mine.open(peer)) as source:
                source.read("any", everything(), soon())
                assert mine.holds(content(3))
    library.fake_gpus(OWN, 0, 1)


def peers_that_left_in_good_order_leave_no_fault() -> None:
    with WORLD.own_peer() as peer, WORLD.ours() as mine:
        source = mine.open(peer)
        source.read("any", Spans.of([Span(0, 0, 0, WIDTHS[0])]), soon())
        peer.tell("leave", SECONDS)
        source.close()
        peer.hear()
        assert peer.ask("faults") == driver.faults() == []
        assert (mine.tensors.read()[0][1] == CANARY).all()


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (a_gpu_without_peer_access_is_refused, peers_that_left_in_good_order_leave_no_fault)
}


if __name__ == "__main__":
    status = ipc_checks.run(CHECKS)
    WORLD.peer().close()
    sys.exit(status)
