"""What data planes promise: checks of one that reads the tensors of another one.

tests/transfer/test_planes.py asks planes of one process; `ipc_checks.py` asks two processes on a GPU. A world is one
kind of plane: `make` makes one, `ours` is `Ours` for a while. A peer has an `address`, and does what it is asked: it
waits for its readers and frees its tensors (`leave`). `peer()` is shared and holds `content(1)`; `own_peer` holds
`content(3)`, and has ended behind the block. `limits` says where the most spans and bytes of a batch stand.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import msgspec
import numpy as np

from fastdeploy_kvcache_v1.errors import CacheStateError, PeerRefusedError, RemoteReadError
from fastdeploy_kvcache_v1.transfer.plane import DataPlane, Source
from fastdeploy_kvcache_v1.transfer.spans import Span, Spans
from fastdeploy_kvcache_v1.worker.ops import BlockRows

WIDTHS = (64 << 10, 64 << 10, 16 << 10, 520)
"""Bytes of a block by region: keys and values, codes of half a byte, scales."""
NUM_BLOCKS = 32
CANARY = 0xEE
SECONDS = 60.0
"""For what takes milliseconds."""


def soon() -> float:
    return time.monotonic() + SECONDS


def content(seed: int) -> list[np.ndarray]:
    """By region, uint8 `[blocks, bytes]`, without a byte of `CANARY`."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, CANARY, (NUM_BLOCKS, width), np.uint8) for width in WIDTHS]


def canaries() -> list[np.ndarray]:
    return [np.full((NUM_BLOCKS, width), CANARY, np.uint8) for width in WIDTHS]


class Tensors:
    """The first two and the last one lie in one allocation, with something before, between and behind them."""

    on_gpu = False

    def __init__(self, arrays: list[np.ndarray]) -> None:
        sizes = [array.nbytes for array in arrays]
        gap = 4096 + 512
        self.pool = self.allocate(sizes[0] + sizes[1] + sizes[3] + 4 * gap)
        self.alone = self.allocate(sizes[2])
        starts = (gap, 2 * gap + sizes[0], 3 * gap + sizes[0] + sizes[1])
        first, second, last = (self.pool[at : at + sizes[i]] for at, i in zip(starts, (0, 1, 3), strict=True))
        parts = (first, second, self.alone, last)
        self.arrays = [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]
        self.write(arrays)

    def allocate(self, num_bytes: int) -> Any:
        """Full of canaries."""
        return np.full(num_bytes, CANARY, np.uint8)

    def address(self, array: Any) -> int:
        return int(array.ctypes.data)

    def write(self, arrays: list[np.ndarray]) -> None:
        for mine, array in zip(self.arrays, arrays, strict=True):
            mine[:] = array

    def fetched(self, array: Any) -> np.ndarray:
        """A copy in this process's memory."""
        return array.copy()

    def read(self) -> list[np.ndarray]:
        return [self.fetched(each) for each in self.arrays]

    def rows(self) -> list[BlockRows]:
        return [
            BlockRows(self.address(each), len(each), each.shape[1], each.shape[1], on_gpu=self.on_gpu, owner=each)
            for each in self.arrays
        ]

    def margins_are_whole(self) -> bool:
        """What lies around the tensors in their allocation is as it was."""
        whole = self.fetched(self.pool)
        for each in (self.arrays[0], self.arrays[1], self.arrays[3]):
            at = self.address(each) - self.address(self.pool)
            whole[at : at + each.nbytes] = CANARY
        return bool((whole == CANARY).all())


class GpuTensors(Tensors):
    """CuPy's arrays."""

    on_gpu = True

    def __init__(self, arrays: list[np.ndarray]) -> None:
        import cupy

        self.cupy = cupy
        super().__init__(arrays)

    def allocate(self, num_bytes: int) -> Any:
        return self.cupy.full(num_bytes, CANARY, np.uint8)

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def write(self, arrays: list[np.ndarray]) -> None:
        for mine, array in zip(self.arrays, arrays, strict=True):
            mine.set(array)
        self.cupy.cuda.Device().synchronize()

    def fetched(self, array: Any) -> np.ndarray:
        self.cupy.cuda.Device().synchronize()
        fetched: np.ndarray = self.cupy.asnumpy(array)
        return fetched


class Ours:
    """A decode rank's plane; its tensors are full of canaries."""

    def __init__(self, plane: DataPlane, tensors: Tensors) -> None:
        self.plane, self.tensors = plane, tensors
        plane.register(tensors.rows())

    def open(self, peer: Any) -> Source:
        return self.plane.open(peer.address, soon())

    def holds(self, expected: list[np.ndarray]) -> bool:
        same = all(np.array_equal(got, want) for got, want in zip(self.tensors.read(), expected, strict=True))
        return same and self.tensors.margins_are_whole()

    def is_untouched(self) -> bool:
        return self.holds(canaries())

    def refill(self) -> None:
        self.tensors.write(canaries())


def everything() -> Spans:
    return Spans.of([Span(region, 0, 0, NUM_BLOCKS * width) for region, width in enumerate(WIDTHS)])


def whole_blocks(sources: list[int], targets: list[int]) -> Spans:
    pairs = list(zip(sources, targets, strict=True))
    places = [(region, width, *pair) for region, width in enumerate(WIDTHS) for pair in pairs]
    return Spans.of([Span(region, source * width, target * width, width) for region, width, source, target in places])


def after(spans: Spans, theirs: list[np.ndarray]) -> list[np.ndarray]:
    """What `Ours` must hold when canaries were read over."""
    expected = canaries()
    for span in spans:
        taken = theirs[span.region].reshape(-1)[span.source_offset : span.source_offset + span.num_bytes]
        expected[span.region].reshape(-1)[span.target_offset : span.target_offset + span.num_bytes] = taken
    return expected


def expect(error: type[Exception], part: str, call: Callable[..., object], *arguments: object) -> None:
    message = None
    try:
        call(*arguments)
    except error as caught:
        message = str(caught)
    assert message is not None, f"no {error.__name__}"
    assert part in message, message


@contextmanager
def opened(world: Any) -> Iterator[tuple[Ours, Source]]:
    with world.ours() as mine, closing(mine.open(world.peer())) as source:
        yield mine, source


# ---- of every plane


def a_read_fills_its_spans_and_touches_nothing_else(world: Any) -> None:
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
        with opened(world) as (mine, source):
            source.read("all", spans, soon())
            assert mine.holds(after(spans, content(1)))
            source.read("all", everything(), soon())
            assert mine.holds(content(1))


def more_than_one_batch_arrives_whole(world: Any) -> None:
    """By spans as by bytes: both limits of a batch are passed."""
    owner, *names = world.limits
    before = [getattr(owner, name) for name in names]
    for name, limit in zip(names, (100, 100_000), strict=True):
        setattr(owner, name, limit)
    try:
        with opened(world) as (mine, source):
            small = Spans.of([Span(0, at * 32, at * 32, 16) for at in range(350)])
            source.read("all", small, soon())
            assert mine.holds(after(small, content(1)))
            source.read("all", everything(), soon())
            assert mine.holds(content(1))
    finally:
        for name, limit in zip(names, before, strict=True):
            setattr(owner, name, limit)


def nothing_is_read_where_nothing_is_wanted(world: Any) -> None:
    with opened(world) as (mine, source):
        source.read("all", Spans.of([]), soon())
        assert mine.is_untouched()


def the_same_peer_may_be_open_twice(world: Any) -> None:
    with opened(world) as (mine, first):
        second = mine.open(world.peer())
        second.read("all", whole_blocks([1], [1]), soon())
        second.close()
        second.close()
        expect(RemoteReadError, "was closed", second.read, "all", everything(), soon())
        first.read("all", everything(), soon())
        assert mine.holds(content(1))


def spans_outside_of_either_side_read_nothing(world: Any) -> None:
    end = NUM_BLOCKS * WIDTHS[0]
    with opened(world) as (mine, source):
        for span in (Span(0, 0, end, 1), Span(len(WIDTHS), 0, 0, 1), Span(0, 0, -1, 1)):
            expect(CacheStateError, "", source.read, "all", Spans.of([span]), soon())
        expect(RemoteReadError, "source bytes outside", source.read, "all", Spans.of([Span(0, end, 0, 1)]), soon())
        expect(RemoteReadError, "source bytes outside", source.read, "all", whole_blocks([0], [0]), soon())
        assert mine.is_untouched()


def a_plane_is_made_for_one_set_of_dense_tensors(world: Any) -> None:
    with world.ours() as mine:
        expect(CacheStateError, "registered already", mine.plane.register, mine.tensors.rows())
        first = mine.tensors.rows()[0]
        strided = BlockRows(first.address, 4, 16, 32, on_gpu=first.on_gpu)
        with closing(world.make()) as other:
            expect(CacheStateError, "one contiguous range", other.register, [strided])


def addresses_of_other_planes_are_refused(world: Any) -> None:
    kind, *rest = msgspec.msgpack.decode(world.peer().address)
    with world.ours() as mine:
        for address in (b"", b"\xc1", msgspec.msgpack.encode([f"no {kind}", *rest]), msgspec.msgpack.encode([kind])):
            expect(PeerRefusedError, "data plane", mine.plane.open, address, soon())


def a_peer_that_is_gone_is_an_error_and_another_one_is_read(world: Any) -> None:
    with world.ours() as mine:
        with world.own_peer() as peer:
            source = mine.open(peer)
            source.read("all", whole_blocks([0], [0]), soon())
            mine.refill()
        for _ in range(2):
            expect(RemoteReadError, "", source.read, "all", everything(), soon())
        source.close()
        mine.refill()
        with closing(mine.open(world.peer())) as other:
            other.read("all", everything(), soon())
        assert mine.holds(content(1))


# ---- where the peer takes no part


def a_deadline_that_is_over_reads_nothing(world: Any) -> None:
    with opened(world) as (mine, source):
        expect(RemoteReadError, "in time", source.read, "all", everything(), time.monotonic() - 1)
        expect(RemoteReadError, "in time", source.read, "all", everything(), soon())
        assert mine.is_untouched()


def closing_a_plane_closes_what_it_opened(world: Any) -> None:
    with world.own_peer() as peer, world.ours() as mine:
        source = mine.open(peer)
        mine.plane.close()
        mine.plane.close()
        expect(RemoteReadError, "was closed", source.read, "all", everything(), soon())
        peer.ask("leave", SECONDS)
        assert mine.is_untouched()


# ---- of CUDA IPC


def tensors_of_a_pool_are_named_by_their_place_in_it(world: Any) -> None:
    fields = msgspec.msgpack.decode(world.peer().address)
    allocations, regions = fields[5], fields[6]
    assert len(allocations) == 2, "each is exported once"
    assert [region[0] for region in regions] == [0, 0, 1, 0]
    assert [region[2] for region in regions] == [NUM_BLOCKS * width for width in WIDTHS]
    assert all(region[1] > 0 for region in (regions[0], regions[1], regions[3]))


def addresses_that_cannot_be_read_are_refused(world: Any) -> None:
    good = msgspec.msgpack.decode(world.peer().address)

    def with_field(index: int, value: object) -> bytes:
        return msgspec.msgpack.encode([*good[:index], value, *good[index + 1 :]])

    beyond = good[5][0][1]
    with world.ours() as mine:
        wrong = {
            "data plane is not cuda_ipc": [with_field(4, b"short")],
            "another machine": [with_field(1, "another boot")],
            "outside of its GPU memory": [with_field(6, [[0, beyond - 10, 11]]), with_field(6, [[len(good[5]), 0, 1]])],
            "is this process": [mine.plane.address()],
        }
        for part, addresses in wrong.items():
            for address in addresses:
                expect(PeerRefusedError, part, mine.plane.open, address, soon())
        handles = [[bytes(64), size] for _, size in good[5]]
        expect(PeerRefusedError, "cannot be mapped", mine.plane.open, with_field(5, handles), soon())
        expect(RemoteReadError, "has ended", mine.plane.open, with_field(3, "/dev/shm/no-such-file"), soon())
        mine.plane.open(with_field(6, [[0, beyond - 10, 10]]), soon()).close()


def a_peer_that_ended_is_named_as_such(world: Any) -> None:
    with world.ours() as mine:
        with world.own_peer() as peer:
            source = mine.open(peer)
        expect(RemoteReadError, "has ended", source.read, "all", everything(), soon())
        expect(RemoteReadError, "has ended", mine.open, peer)
        assert mine.is_untouched()


EVERY_PLANE: tuple[Callable[[Any], None], ...] = (
    a_read_fills_its_spans_and_touches_nothing_else,
    more_than_one_batch_arrives_whole,
    nothing_is_read_where_nothing_is_wanted,
    the_same_peer_may_be_open_twice,
    spans_outside_of_either_side_read_nothing,
    a_plane_is_made_for_one_set_of_dense_tensors,
    addresses_of_other_planes_are_refused,
    a_peer_that_is_gone_is_an_error_and_another_one_is_read,
)
ONE_SIDED = (*EVERY_PLANE, a_deadline_that_is_over_reads_nothing, closing_a_plane_closes_what_it_opened)
CUDA_IPC = (
    *ONE_SIDED,
    tensors_of_a_pool_are_named_by_their_place_in_it,
    addresses_that_cannot_be_read_are_refused,
    a_peer_that_ended_is_named_as_such,
)
