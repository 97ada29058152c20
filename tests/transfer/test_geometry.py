"""Head ranges against a model that is split by hand, what a handshake refuses, spans against blocks one by one."""

import dataclasses
import itertools
import random

import numpy as np
import pytest

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.attention.layouts import DSACacheBackend, GQACacheBackend, MLACacheBackend
from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, PeerRefusedError
from fastdeploy_kvcache_v1.transfer.geometry import Geometry, pieces, require_compatible, source_ranks
from fastdeploy_kvcache_v1.transfer.spans import Chunk, Span, Spans, spans_of

LAYERS, BLOCK, DIM = 2, 4, 8


def gqa(heads, tp_size, tp_rank, *, scales=False, dtype="float16"):
    own = max(1, heads // tp_size)
    layout = GQACacheBackend(LAYERS, own, DIM, BLOCK, dtype, scale_dtype="bfloat16" if scales else None).layout
    return Geometry.of(layout, model="m", block_size=BLOCK, tp_size=tp_size, tp_rank=tp_rank, num_kv_heads=heads)


def whole(layout, tp_size, tp_rank):
    return Geometry.of(layout, model="m", block_size=BLOCK, tp_size=tp_size, tp_rank=tp_rank)


def gathered(sources, target, blocks):
    """Target's block of each role, byte by byte from `blocks[rank][role]`; counts how often each byte is written."""
    made = [np.zeros(role.block_bytes, np.uint8) for role in target.roles]
    written = [np.zeros(role.block_bytes, int) for role in target.roles]
    for rank, source in enumerate(sources):
        for piece in pieces(source, target):
            place = slice(piece.target_offset, piece.target_offset + piece.num_bytes)
            taken = blocks[rank][piece.role][piece.source_offset : piece.source_offset + piece.num_bytes]
            assert len(taken) == piece.num_bytes, "a piece ends behind the source's block"
            made[piece.role][place] = taken
            written[piece.role][place] += 1
    return made, written


SIZES = [(1, 1), (1, 2), (2, 1), (2, 4), (4, 2), (4, 4), (8, 2), (3, 2), (1, 8)]
EVEN = [
    (*sizes, heads)
    for sizes in SIZES
    for heads in (1, 2, 4, 8, 6, 24)
    if all(max(heads, tp) % min(heads, tp) == 0 for tp in sizes)
]


@pytest.mark.parametrize("scales", [False, True], ids=["plain", "scales"])
@pytest.mark.parametrize(("source_tp", "target_tp", "heads"), EVEN)
def test_head_ranges_give_each_rank_the_heads_of_the_model(source_tp, target_tp, heads, scales):
    sources = [gqa(heads, source_tp, rank, scales=scales) for rank in range(source_tp)]
    rng = np.random.default_rng(0)
    model = [rng.integers(0, 256, (heads, role.unit_bytes), np.uint8) for role in sources[0].roles]

    def of_rank(tp_size, rank):
        """As a model loader splits it: the own heads, one behind the other."""
        first = rank * heads // tp_size
        return [role[first : first + max(1, heads // tp_size)].reshape(-1) for role in model]

    blocks = [of_rank(source_tp, rank) for rank in range(source_tp)]
    for rank in range(target_tp):
        target = gqa(heads, target_tp, rank, scales=scales)
        for source in sources:
            require_compatible(target, source)
        made, written = gathered(sources, target, blocks)
        for got, expected, times in zip(made, of_rank(target_tp, rank), written, strict=True):
            assert np.array_equal(got, expected)
            assert set(times.tolist()) == {1}
        assert [number for number in range(source_tp) if pieces(sources[number], target)] == source_ranks(
            target, source_tp
        )


def test_replicated_heads_are_read_from_different_ranks():
    targets = [gqa(2, 8, rank) for rank in range(8)]
    assert [source_ranks(target, 8) for target in targets] == [[rank] for rank in range(8)]
    assert [source_ranks(target, 4) for target in targets] == [[0], [1], [0], [1], [2], [3], [2], [3]]


@pytest.mark.parametrize(
    "layout",
    [MLACacheBackend(LAYERS, 16, 8, BLOCK, "float16").layout, DSACacheBackend(LAYERS, 128, 64, 128, BLOCK).layout],
    ids=["mla", "dsa"],
)
@pytest.mark.parametrize(("source_tp", "target_tp"), SIZES)
def test_a_latent_block_comes_whole_from_one_rank(layout, source_tp, target_tp):
    sources = [whole(layout, source_tp, rank) for rank in range(source_tp)]
    block = [np.random.default_rng(1).integers(0, 256, role.block_bytes, np.uint8) for role in layout.roles]
    for rank in range(target_tp):
        target = whole(layout, target_tp, rank)
        made, written = gathered(sources, target, [block] * source_tp)
        assert all(np.array_equal(got, expected) for got, expected in zip(made, block, strict=True))
        assert all(set(times.tolist()) == {1} for times in written)
        assert source_ranks(target, source_tp) == [rank % source_tp]


OURS = gqa(4, 2, 1)


@pytest.mark.parametrize(
    ("theirs", "both"),
    [
        (dataclasses.replace(OURS, version=7), ("1", "7")),
        (dataclasses.replace(OURS, model="other"), ("'m'", "'other'")),
        (dataclasses.replace(OURS, block_size=16), ("4", "16")),
        (dataclasses.replace(OURS, num_layers=3), ("2", "3")),
        (gqa(8, 2, 1), ("4", "8")),
        (gqa(4, 2, 1, dtype="bfloat16"), ("'float16'", "'bfloat16'")),
        (gqa(4, 2, 1, scales=True), ("['key', 'value']", "['key', 'value', 'key_scale', 'value_scale']")),
        (whole(GQACacheBackend(LAYERS, 2, DIM, BLOCK, "float16").layout, 2, 1), ("4", "None")),
    ],
    ids=["version", "model", "block size", "layers", "heads", "dtype", "roles", "split"],
)
def test_an_unequal_cache_is_refused_with_both_values(theirs, both):
    with pytest.raises(PeerRefusedError) as refused:
        require_compatible(OURS, theirs)
    text = str(refused.value)
    assert f"{both[0]} here" in text
    assert f"{both[1]} on the peer" in text
    assert "\n" not in text


def test_a_forged_geometry_is_refused():
    """What a peer says about itself decides which bytes are read: it must be possible."""
    forged = {"tp_rank": 2}, {"tp_rank": -1}, {"tp_size": 3}, {"tp_size": 0}, {"tp_size": 1, "tp_rank": 0}
    for role in {"num_heads": 0}, {"block_bytes": 1}:
        forged += ({"roles": tuple(dataclasses.replace(each, **role) for each in OURS.roles)},)
    for changes in forged:
        with pytest.raises(PeerRefusedError):
            require_compatible(OURS, dataclasses.replace(OURS, **changes))


@pytest.mark.parametrize(
    ("heads", "tp_size", "tp_rank", "shape"),
    [(4, 3, 0, (1, 4, 8)), (4, 2, 2, (2, 4, 8)), (4, 2, 0, (4, 4, 8))],
    ids=["uneven", "rank", "shape"],
)
def test_a_layout_that_is_no_part_of_the_model_is_refused(heads, tp_size, tp_rank, shape):
    layout = CacheLayout(1, (RoleSpec("key", shape, "float16"),))
    with pytest.raises(ConfigError):
        Geometry.of(layout, model="m", block_size=4, tp_size=tp_size, tp_rank=tp_rank, num_kv_heads=heads)


# ---- spans

NUM_BLOCKS = 16


def tensors(geometry, seed=None):
    """One `[NUM_BLOCKS, block bytes]` per region, random or zero."""
    sizes = [role.block_bytes for _ in range(geometry.num_layers) for role in geometry.roles]
    if seed is None:
        return [np.zeros((NUM_BLOCKS, size), np.uint8) for size in sizes]
    rng = np.random.default_rng(seed)
    return [rng.integers(1, 256, (NUM_BLOCKS, size), np.uint8) for size in sizes]


def copied(spans, sources, targets):
    for span in spans:
        taken = sources[span.region].reshape(-1)[span.source_offset : span.source_offset + span.num_bytes]
        targets[span.region].reshape(-1)[span.target_offset : span.target_offset + span.num_bytes] = taken


@pytest.mark.parametrize("seed", range(20))
def test_spans_move_the_blocks_of_a_chunk_and_touch_nothing_else(seed):
    rng = random.Random(seed)
    geometry = gqa(4, 2, 0, scales=True)
    sources, targets, expected = tensors(geometry, seed), tensors(geometry), tensors(geometry)
    count = rng.randint(1, NUM_BLOCKS)
    there, here = rng.sample(range(NUM_BLOCKS), count), rng.sample(range(NUM_BLOCKS), count)
    if seed % 3 == 0:
        there, here = sorted(there), sorted(here)
    first, end = sorted((rng.randint(0, count), rng.randint(0, count)))
    chunk = Chunk(first, end, *sorted((rng.randint(0, LAYERS), rng.randint(0, LAYERS))))
    for layer, block in itertools.product(range(chunk.first_layer, chunk.end_layer), range(first, end)):
        for role in range(4):
            region = layer * 4 + role
            expected[region][here[block]] = sources[region][there[block]]
    spans = spans_of(geometry, geometry, there, here, chunk)
    copied(spans, sources, targets)
    assert all(np.array_equal(got, want) for got, want in zip(targets, expected, strict=True))
    again = tensors(geometry)
    for batch in spans.batches(most_spans=3, most_bytes=100):
        assert len(batch) <= 3
        assert 0 < batch.num_bytes <= 100
        copied(batch, sources, again)
    assert all(np.array_equal(got, want) for got, want in zip(again, expected, strict=True))


def test_neighbouring_slots_become_one_span():
    geometry = gqa(4, 1, 0)
    size = geometry.roles[0].block_bytes
    spans = spans_of(geometry, geometry, [3, 4, 5, 9], [0, 1, 2, 3], Chunk(0, 4, 1, 2))
    assert list(spans) == [
        Span(2, 3 * size, 0, 3 * size),
        Span(2, 9 * size, 3 * size, size),
        Span(3, 3 * size, 0, 3 * size),
        Span(3, 9 * size, 3 * size, size),
    ]


def test_neighbours_on_one_side_only_stay_apart():
    spans = Spans.of([Span(0, 0, 10, 5), Span(0, 5, 20, 5), Span(0, 30, 25, 5), Span(1, 35, 30, 5)])
    assert list(spans.coalesced()) == list(spans)


def test_nothing_is_read_of_a_rank_that_holds_no_head_that_is_wanted():
    assert len(spans_of(gqa(4, 2, 1), gqa(4, 4, 0), [0, 1], [0, 1], Chunk(0, 2, 0, LAYERS))) == 0


@pytest.mark.parametrize("chunk", [Chunk(0, 3, 0, 1), Chunk(0, 1, 0, LAYERS + 1), Chunk(2, 1, 0, 1)])
def test_a_chunk_outside_of_what_was_offered_is_refused(chunk):
    with pytest.raises(CacheStateError, match="outside"):
        spans_of(gqa(4, 1, 0), gqa(4, 1, 0), [0, 1], [0, 1], chunk)
