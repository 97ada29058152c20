"""`CudaIpcPlane` between two processes on one GPU: bytes, bounds, refusals, and peers that end.

`suite.py` runs them on a GPU; tests/transfer/test_cuda_ipc_plane.py over the fake one.
"""

from __future__ import annotations

import random
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache

import cupy
import msgspec
import numpy as np
from ipc_peer import CANARY, NUM_BLOCKS, WIDTHS, Peer, Tensors, content

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, PeerRefusedError, RemoteReadError
from fastdeploy_kvcache_v1.transfer.cuda_ipc_plane import CudaIpcPlane
from fastdeploy_kvcache_v1.transfer.cuda_ipc_source import CudaIpcSource
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans
from fastdeploy_kvcache_v1.worker.ops import BlockRows

SECONDS = 60.0
"""For what takes milliseconds."""


def soon() -> float:
    return time.monotonic() + SECONDS


class Ours:
    """A decode worker's plane in this process; its tensors are full of canaries."""

    def __init__(self) -> None:
        self.tensors = Tensors([np.full((NUM_BLOCKS, width), CANARY, np.uint8) for width in WIDTHS])
        self.plane = CudaIpcPlane()
        self.plane.register(self.tensors.rows())

    def open(self, peer: Peer) -> CudaIpcSource:
        source = self.plane.open(peer.address, soon())
        assert isinstance(source, CudaIpcSource)
        return source

    def holds(self, expected: list[np.ndarray]) -> bool:
        same = all(np.array_equal(got, want) for got, want in zip(self.tensors.read(), expected, strict=True))
        return same and self.tensors.margins_are_whole()

    def is_untouched(self) -> bool:
        return self.holds(canaries())

    def refill(self) -> None:
        for array in self.tensors.arrays:
            array.fill(CANARY)
        cupy.cuda.Device().synchronize()


def canaries() -> list[np.ndarray]:
    return [np.full((NUM_BLOCKS, width), CANARY, np.uint8) for width in WIDTHS]


def everything() -> Spans:
    return Spans.of([Span(region, 0, 0, NUM_BLOCKS * width) for region, width in enumerate(WIDTHS)])


def whole_blocks(sources: list[int], targets: list[int]) -> Spans:
    return Spans.of(
        [
            Span(region, source * width, target * width, width)
            for region, width in enumerate(WIDTHS)
            for source, target in zip(sources, targets, strict=True)
        ]
    )


def after(spans: Spans, theirs: list[np.ndarray]) -> list[np.ndarray]:
    """What `Ours` must hold when canaries were read over."""
    expected = canaries()
    for span in spans:
        taken = theirs[span.region].reshape(-1)[span.source_offset : span.source_offset + span.num_bytes]
        expected[span.region].reshape(-1)[span.target_offset : span.target_offset + span.num_bytes] = taken
    return expected


@cache
def shared_peer() -> Peer:
    """Starting one takes seconds."""
    return Peer()


@contextmanager
def own_peer(seed: int = 3) -> Iterator[Peer]:
    peer = Peer(seed)
    try:
        yield peer
    finally:
        peer.kill()


@contextmanager
def ours() -> Iterator[Ours]:
    made = Ours()
    try:
        yield made
    finally:
        made.plane.close()


def expect(error: type[Exception], part: str, call: Callable[..., object], *arguments: object) -> None:
    message = None
    try:
        call(*arguments)
    except error as caught:
        message = str(caught)
    assert message is not None, f"no {error.__name__}"
    assert part in message, message


# ---- bytes


def a_read_fills_its_spans_and_touches_nothing_else() -> None:
    for seed in range(4):
        chosen = random.Random(seed)
        sources, targets = chosen.sample(range(NUM_BLOCKS), 20), chosen.sample(range(NUM_BLOCKS), 20)
        spans = Spans.of(
            [
                Span(region, source * width + at, target * width + at, count)
                for region, width in enumerate(WIDTHS)
                for source, target in zip(sources, targets, strict=True)
                for at, count in [(chosen.randrange(100), chosen.choice([1, 7, 400, width - 100]))]
            ]
        )
        with ours() as mine, closing(mine.open(shared_peer())) as source:
            source.read("any", spans, soon())
            assert mine.holds(after(spans, content(1)))
            source.read("any", everything(), soon())
            assert mine.holds(content(1))


def more_than_one_batch_arrives_whole() -> None:
    """By spans as by bytes: both limits of a batch are passed."""
    limits = CudaIpcSource.most_spans, CudaIpcSource.most_bytes
    CudaIpcSource.most_spans, CudaIpcSource.most_bytes = 100, 100_000
    try:
        with ours() as mine, closing(mine.open(shared_peer())) as source:
            small = Spans.of([Span(0, at * 32, at * 32, 16) for at in range(350)])
            source.read("any", small, soon())
            assert mine.holds(after(small, content(1)))
            source.read("any", everything(), soon())
            assert mine.holds(content(1))
    finally:
        CudaIpcSource.most_spans, CudaIpcSource.most_bytes = limits


def nothing_is_read_where_nothing_is_wanted() -> None:
    with ours() as mine, closing(mine.open(shared_peer())) as source:
        source.read("any", Spans.of([]), soon())
        assert mine.is_untouched()


def what_the_peer_has_computed_is_what_is_read() -> None:
    """Its kernels have ended when it says so; then another process sees their bytes."""
    with own_peer() as peer, ours() as mine, closing(mine.open(peer)) as source:
        for value in range(1, 21):
            peer.ask("compute", value, value)
            source.read("any", whole_blocks([value], [0]), soon())
            assert all((tensor[0] == value).all() for tensor in mine.tensors.read()), value


def the_same_peer_may_be_open_twice() -> None:
    with ours() as mine, closing(mine.open(shared_peer())) as first:
        second = mine.open(shared_peer())
        second.read("any", whole_blocks([1], [1]), soon())
        second.close()
        second.close()
        first.read("any", everything(), soon())
        assert mine.holds(content(1))


# ---- bounds and refusals


def spans_outside_of_either_side_read_nothing() -> None:
    end = NUM_BLOCKS * WIDTHS[0]
    with ours() as mine:
        with closing(mine.open(shared_peer())) as source:
            for span in (Span(0, 0, end, 1), Span(len(WIDTHS), 0, 0, 1), Span(0, 0, -1, 1)):
                expect(CacheStateError, "", source.read, "any", Spans.of([span]), soon())
            expect(RemoteReadError, "source bytes outside", source.read, "any", Spans.of([Span(0, end, 0, 1)]), soon())
        assert mine.is_untouched()


def a_deadline_that_is_over_reads_nothing() -> None:
    with ours() as mine:
        with closing(mine.open(shared_peer())) as source:
            expect(RemoteReadError, "in time", source.read, "any", everything(), time.monotonic() - 1)
            expect(RemoteReadError, "in time", source.read, "any", everything(), soon())
        assert mine.is_untouched()


def tensors_of_a_pool_are_named_by_their_place_in_it() -> None:
    fields = msgspec.msgpack.decode(shared_peer().address)
    allocations, regions = fields[5], fields[6]
    assert len(allocations) == 2, "each is exported once"
    assert len({region[0] for region in regions}) == 2
    assert [region[2] for region in regions] == [NUM_BLOCKS * width for width in WIDTHS]
    assert all(region[1] > 0 for region in (regions[0], regions[1], regions[3]))


def addresses_that_cannot_be_read_are_refused() -> None:
    good = msgspec.msgpack.decode(shared_peer().address)

    def with_field(index: int, value: object) -> bytes:
        return msgspec.msgpack.encode([*good[:index], value, *good[index + 1 :]])

    beyond = good[5][0][1]
    with ours() as mine:
        wrong = {
            "data plane is not cuda_ipc": [b"", b"\xc1", with_field(0, "mooncake"), with_field(4, b"short")],
            "another machine": [with_field(1, "another boot")],
            "outside of its GPU memory": [
                with_field(6, [[0, beyond - 10, 11]]),
                with_field(6, [[len(good[5]), 0, 1]]),
            ],
            "is this process": [mine.plane.address()],
        }
        for part, addresses in wrong.items():
            for address in addresses:
                expect(PeerRefusedError, part, mine.plane.open, address, soon())
        handles = [[bytes(64), size] for _, size in good[5]]
        expect(PeerRefusedError, "cannot be mapped", mine.plane.open, with_field(5, handles), soon())
        expect(RemoteReadError, "has ended", mine.plane.open, with_field(3, "/dev/shm/no-such-file"), soon())


def memory_that_cannot_be_exported_is_refused_at_the_start() -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    address = cupy.cuda.runtime.mallocAsync(4096, stream.ptr)
    stream.synchronize()
    for each, part in (
        (BlockRows(address, 4, 1024, 1024, on_gpu=True), "FLAGS_use_cuda_malloc_async_allocator"),
        (BlockRows(np.zeros(4096, np.uint8).ctypes.data, 4, 1024, 1024), "cuda_ipc needs a GPU"),
    ):
        expect(ConfigError, part, CudaIpcPlane().register, [each])


def a_plane_is_made_for_one_set_of_dense_tensors() -> None:
    with ours() as mine:
        expect(CacheStateError, "registered already", mine.plane.register, mine.tensors.rows())
        first = mine.tensors.rows()[0]
        strided = BlockRows(first.address, 4, 16, 32, on_gpu=True)
        expect(CacheStateError, "one contiguous range", CudaIpcPlane().register, [strided])


# ---- ends


def a_peer_that_died_is_an_error_and_another_one_is_read() -> None:
    with ours() as mine:
        with own_peer() as peer:
            source = mine.open(peer)
            source.read("any", whole_blocks([0], [0]), soon())
            mine.refill()
        expect(RemoteReadError, "has ended", source.read, "any", everything(), soon())
        expect(RemoteReadError, "has ended", source.read, "any", everything(), soon())
        source.close()
        expect(RemoteReadError, "has ended", mine.plane.open, peer.address, soon())
        mine.refill()
        with closing(mine.open(shared_peer())) as other:
            other.read("any", everything(), soon())
        assert mine.holds(content(1))


def an_owner_waits_until_its_memory_is_closed_elsewhere() -> None:
    with own_peer() as peer, ours() as mine:
        source = mine.open(peer)
        source.read("any", whole_blocks([0], [0]), soon())
        peer.tell("leave", SECONDS)
        assert not select.select([peer.process.stdout], [], [], 0.3)[0], "it did not wait"
        source.read("any", whole_blocks([1], [1]), soon())
        source.close()
        peer.hear()
        expect(RemoteReadError, "has ended", mine.open, peer)


def closing_a_plane_closes_what_it_opened() -> None:
    with own_peer() as peer:
        mine = Ours()
        source = mine.open(peer)
        mine.plane.close()
        mine.plane.close()
        expect(RemoteReadError, "was closed", source.read, "any", everything(), soon())
        peer.ask("leave", SECONDS)
        assert mine.is_untouched()


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: check
    for check in (
        a_read_fills_its_spans_and_touches_nothing_else,
        more_than_one_batch_arrives_whole,
        nothing_is_read_where_nothing_is_wanted,
        what_the_peer_has_computed_is_what_is_read,
        the_same_peer_may_be_open_twice,
        spans_outside_of_either_side_read_nothing,
        a_deadline_that_is_over_reads_nothing,
        tensors_of_a_pool_are_named_by_their_place_in_it,
        addresses_that_cannot_be_read_are_refused,
        memory_that_cannot_be_exported_is_refused_at_the_start,
        a_plane_is_made_for_one_set_of_dense_tensors,
        a_peer_that_died_is_an_error_and_another_one_is_read,
        an_owner_waits_until_its_memory_is_closed_elsewhere,
        closing_a_plane_closes_what_it_opened,
    )
}


def run(checks: dict[str, Callable[[], None]]) -> int:
    """Each prints a line. 1 when one failed."""
    failed = 0
    for name, check in checks.items():
        try:
            check()
            print(f"ok      {name}", flush=True)
        except Exception:  # the edge of one check: the others still run
            failed += 1
            print(f"FAILED  {name}\n{traceback.format_exc()}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    status = run(CHECKS)
    shared_peer().kill()
    sys.exit(status)
