"""What no GPU does when it is asked to: copies that stand still or fail, GPUs that do not reach each other, memory that
is freed too early. tests/transfer/test_cuda_ipc_plane.py runs them over the fake driver.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import ipc_checks
from cupy import driver
from ipc_checks import WORLD
from ipc_peer import GpuTensors
from plane_contract import CANARY, SECONDS, WIDTHS, Ours, canaries, content, everything, expect, soon, whole_blocks

from fastdeploy_kvcache_v1.errors import PeerRefusedError, RemoteReadError
from fastdeploy_kvcache_v1.transfer.cuda_ipc_plane import CudaIpcPlane
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans

library = driver.library
OWN, OTHER = 1, 7
"""Names of GPUs."""


@contextmanager
def a_gpu_that_stands_still() -> Iterator[None]:
    """It moves on only when somebody waits for all of a stream."""
    library.fake_progress(0)
    try:
        yield
    finally:
        library.fake_progress(4)


def nothing_arrives_any_more(mine: Ours) -> bool:
    assert library.fake_pending() == 0, "a copy is still under way"
    mine.refill()
    library.fake_run_all()
    return mine.is_untouched()


def a_read_that_is_late_has_ended_when_it_raises() -> None:
    with WORLD.ours() as mine, closing(mine.open(WORLD.peer())) as source:
        with a_gpu_that_stands_still():
            expect(RemoteReadError, "in time", source.read, "any", everything(), time.monotonic() + 0.1)
            assert nothing_arrives_any_more(mine)
        expect(RemoteReadError, "in time", source.read, "any", everything(), soon())


def a_read_that_is_closed_has_ended_when_close_returns() -> None:
    with WORLD.ours() as mine, a_gpu_that_stands_still():
        source, failures = mine.open(WORLD.peer()), []

        def read() -> None:
            try:
                source.read("any", everything(), soon())
            except RemoteReadError as error:
                failures.append(str(error))

        thread = threading.Thread(target=read)
        thread.start()
        while not library.fake_pending():
            time.sleep(0.001)
        source.close()
        assert nothing_arrives_any_more(mine)
        thread.join(20)
        assert "was closed" in failures[0]
        assert library.fake_num_mapped() == 0


def a_copy_that_fails_is_an_error_and_gives_everything_back() -> None:
    for refuse_in, break_in in ((1, 0), (3, 0), (0, 3)):
        driver.reset(1)
        mine = Ours(CudaIpcPlane(), GpuTensors(canaries()))
        source = mine.open(WORLD.peer())
        assert library.fake_num_mapped() == 2
        library.fake_fail_copy(refuse_in, break_in)
        pairs = [3, 4, 9], [5, 1, 2]
        expect(RemoteReadError, "CUDA error" if refuse_in else "700", source.read, "any", whole_blocks(*pairs), soon())
        if refuse_in:
            assert library.fake_num_mapped() == 0
            assert nothing_arrives_any_more(mine)
            with closing(mine.open(WORLD.peer())) as other:
                other.read("any", everything(), soon())
            assert mine.holds(content(1))
        mine.plane.close()
    driver.reset(1)


def a_peer_that_dies_under_a_copy_fails_the_read() -> None:
    """The copy itself ends well: what the fake has mapped outlives its owner."""
    with WORLD.own_peer() as peer, WORLD.ours() as mine:
        source = mine.open(peer)
        record = source._stream.record_event

        def dies() -> object:
            event = record()
            peer.process.kill()
            peer.process.wait()
            library.fake_run_all()
            return event

        source._stream.record_event = dies
        expect(RemoteReadError, "has ended", source.read, "any", whole_blocks([1], [1]), soon())
        assert library.fake_num_mapped() == 0


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


def memory_that_is_freed_under_a_reader_is_seen_by_the_fake() -> None:
    """So an owner that does not wait is found by the other checks."""
    with WORLD.own_peer() as peer:
        mine = Ours(CudaIpcPlane(), GpuTensors(canaries()))
        source = mine.open(peer)
        peer.ask("leave", 0.0)
        assert "another process has mapped" in peer.ask("faults")[0]
        with closing(source):
            expect(RemoteReadError, "", source.read, "any", everything(), soon())
        mine.plane.close()
    driver.reset(1)


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
    for check in (
        a_read_that_is_late_has_ended_when_it_raises,
        a_read_that_is_closed_has_ended_when_close_returns,
        a_copy_that_fails_is_an_error_and_gives_everything_back,
        a_peer_that_dies_under_a_copy_fails_the_read,
        a_gpu_without_peer_access_is_refused,
        memory_that_is_freed_under_a_reader_is_seen_by_the_fake,
        peers_that_left_in_good_order_leave_no_fault,
    )
}


if __name__ == "__main__":
    status = ipc_checks.run(CHECKS)
    WORLD.peer().kill()
    sys.exit(status)
