"""Spans against blocks that are copied one by one."""

import itertools
import random

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError
from fastdeploy_kvcache_v1.transfer.spans import Chunk, Span, Spans, spans_of
from tests.transfer.test_geometry import LAYERS, gqa

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
