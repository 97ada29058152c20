"""The checksum model says the same however it is asked, and notices every wrong bit."""

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import paddle  # noqa: F401  # at its import it asks the system for its libraries, which no test may
import pytest

from fastdeploy_kvcache_v1.attention.layouts import FAMILIES
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.lab.model import load_model
from fastdeploy_kvcache_v1.lab.model.checksum import ChecksumModel
from fastdeploy_kvcache_v1.lab.model.config import ChecksumConfig
from fastdeploy_kvcache_v1.lab.model.ranks import ONE_RANK
from fastdeploy_kvcache_v1.lab.model.step import SequenceSlice
from fastdeploy_kvcache_v1.lab.model.tensors import as_array
from tests.lab.server.engine.family_engine import rank_group

BLOCK, NUM_BLOCKS = 8, 48
PROMPT = [random.Random(2).randrange(256) for _ in range(150)]
TABLE = list(range(24))
OTHER = [47 - at for at in range(24)]
LAYOUTS = {
    **{family: (family, "float32") for family in FAMILIES},
    "mla": ("mla", "bfloat16"),
    "gqa bfloat16": ("gqa", "bfloat16"),
    "gqa fp8": ("gqa", "block_wise_fp8"),
}
"""Family and dtype of the cache."""
LAYOUT = ChecksumConfig(num_layers=3).cache_backend(block_size=BLOCK, dtype="float32").layout


class Sequence:
    """A model with caches, and a prompt whose tokens it computes."""

    def __init__(self, layout, *, guessable=False, drafts=False, **options):
        family, dtype = LAYOUTS[layout]
        config = ChecksumConfig(family, num_layers=3, num_draft_layers=int(drafts), guessable=guessable or drafts)
        backend = config.cache_backend(block_size=BLOCK, dtype=dtype)
        self.model = ChecksumModel(config, backend.layout, **options)
        self.caches = list(backend.create_kv_cache(NUM_BLOCKS).values())
        items = [role.dtype for _ in range(backend.layout.num_layers) for role in backend.layout.roles]
        widths = {"float32": "u4", "bfloat16": "u2", "uint8": "u1"}
        self.bytes = [
            as_array(cache, widths[item]).reshape(NUM_BLOCKS, -1).view(np.uint8)
            for cache, item in zip(self.caches, items, strict=True)
        ]
        """`[NUM_BLOCKS, n]` of each cache."""

    def compute(self, tokens, start, table=TABLE, *, needs_logits=True, num_drafts=0):
        slice_ = SequenceSlice(np.array(tokens), start, table, needs_logits, num_drafts)
        return self.model.forward([slice_], self.caches)[0]

    def generate(self, count=8, *, start=0, table=TABLE, cuts=()):
        """Greedy tokens after `PROMPT`, whose first `start` tokens are cached; in pieces that end at `cuts`."""
        tokens, at = list(PROMPT), start
        for cut in cuts:
            assert len(self.compute(tokens[at:cut], at, table, needs_logits=False)) == 0
            at = cut
        while len(tokens) < len(PROMPT) + count:
            (logits,) = self.compute(tokens[at:], at, table)
            at = len(tokens)
            tokens.append(int(logits.argmax()))
        return tokens[len(PROMPT) :]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_do_not_depend_on_chunks_batches_or_blocks(layout):
    sequence = Sequence(layout)
    expected = sequence.generate()
    assert len(set(expected)) > 4
    assert sequence.generate(cuts=(8, 9, 100, 149)) == expected
    assert sequence.generate(start=149) == expected, "from the cache"
    assert sequence.generate(cuts=range(1, 150)) == expected
    for rows in sequence.bytes:
        rows[OTHER[:18]] = rows[TABLE[:18]]
        rows[TABLE] = 0xAA
    assert sequence.generate(start=140, table=OTHER) == expected, "whatever is in blocks of others, or behind its end"
    slices = [SequenceSlice(np.array(PROMPT[:n]), 0, table) for n, table in ((150, TABLE), (30, OTHER), (1, [23]))]
    logits = sequence.model.forward(slices, sequence.caches)
    assert int(logits[0].argmax()) == expected[0]
    assert [each.shape for each in logits] == [(1, 264)] * 3
    assert np.array_equal(logits[1], Sequence(layout).compute(PROMPT[:30], 0))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_wrong_bit_of_a_prefix_changes_what_follows(layout):
    """1,000 bits, and 100 each of rows that are zero and blocks that are another block's, one tensor's alone."""
    sequence, rng = Sequence(layout), random.Random(layout)
    sequence.compute(PROMPT[:144], 0)
    right, unnoticed = sequence.compute(PROMPT[144:], 144), []
    for number in range(1200):
        rows = sequence.bytes[rng.randrange(len(sequence.bytes))]
        block, kept = rng.randrange(18), rows.copy()
        if number < 1000:
            rows[block, rng.randrange(rows.shape[1])] ^= 1 << rng.randrange(8)
        elif number < 1100:
            width = rows.shape[1] // BLOCK // (4 if "gqa" in layout else 1)
            row = rng.randrange(rows.shape[1] // width) * width
            rows[block, row : row + width] = 0
        else:
            rows[block] = rows[(block + 1 + rng.randrange(17)) % 18]
        if np.array_equal(sequence.compute(PROMPT[144:], 144), right):
            unnoticed.append(number)
        rows[:] = kept
    assert np.array_equal(sequence.compute(PROMPT[144:], 144), right)
    assert unnoticed == []


def test_it_writes_the_rows_of_its_tokens_and_no_others():
    sequence = Sequence("gqa bfloat16")
    sequence.compute(PROMPT[:20], 0, [5, 3, 9])
    before = [rows.copy() for rows in sequence.bytes]
    sequence.compute(PROMPT[20:21], 20, [5, 3, 9])
    for rows, old in zip(sequence.bytes, before, strict=True):
        changed = (rows != old).reshape(NUM_BLOCKS, 4, BLOCK, -1).any(axis=(1, 3))
        assert np.argwhere(changed).tolist() == [[9, 4]]


def test_a_layer_is_read_when_its_turn_comes():
    """Until `before_layer` has returned, its blocks may hold anything."""
    sequence = Sequence("gqa", drafts=True)
    expected = sequence.generate(1)
    sequence.model.guess([SequenceSlice(np.array(PROMPT), 0, TABLE)], expected, sequence.caches)
    roles, layers = 2, []
    kept = [rows[:16].copy() for rows in sequence.bytes]
    for rows in sequence.bytes[: roles * 3]:
        rows[:16] = 0

    def arrive(layer):
        layers.append(layer)
        for number in range(layer * roles, (layer + 1) * roles):
            sequence.bytes[number][:16] = kept[number]

    slice_ = SequenceSlice(np.array(PROMPT[128:]), 128, TABLE)
    logits = sequence.model.forward([slice_], sequence.caches, arrive)[0]
    assert (int(logits.argmax()), layers) == (expected[0], [0, 1, 2])
    for rows in sequence.bytes[roles * 3 :]:
        rows[:16] = 0
    right = sequence.model.guess([slice_], expected, sequence.caches, arrive)
    assert layers == [0, 1, 2, 3]
    sequence.bytes[-1][3] = 0
    assert sequence.model.guess([slice_], expected, sequence.caches) != right


def test_tokens_depend_on_the_seed_and_on_numbers_that_stand_for_images():
    one, other = Sequence("gqa").generate(), Sequence("gqa", seed=1).generate()
    assert one != other
    unnamed = Sequence("gqa")
    unnamed.model = load_model(None, ChecksumConfig(num_layers=3), LAYOUT, ONE_RANK)
    assert unnamed.generate() == one
    assert not np.array_equal(Sequence("gqa").compute([1, 2**62, 3], 0), Sequence("gqa").compute([1, 2**62 + 1, 3], 0))


def test_about_half_of_the_guesses_are_right_and_none_changes_a_token():
    expected = Sequence("dsa", guessable=True).generate(40)
    sequence = Sequence("dsa", drafts=True)
    tokens, at, drafts, verified, right = list(PROMPT), 0, [], 0, 0
    while len(tokens) < len(PROMPT) + 40:
        logits = sequence.compute([*tokens[at:], *drafts], at, num_drafts=len(drafts))
        chosen = [int(row.argmax()) for row in logits]
        kept = 2 if drafts == chosen[:1] else 1
        verified, right, end = verified + len(drafts), right + kept - 1, len(tokens) + kept - 1
        tokens += chosen[:kept]
        slice_ = SequenceSlice(np.array(tokens[at:end]), at, TABLE)
        drafts, at = sequence.model.guess([slice_], [tokens[-1]], sequence.caches), end
    assert tokens[len(PROMPT) :][:40] == expected
    assert verified // 3 < right < verified * 2 // 3


@pytest.mark.parametrize("layout", ["gqa", "dsa"])
def test_a_wrong_bit_in_the_draft_layer_costs_guesses_and_no_token(layout):
    sequence, rng = Sequence(layout, drafts=True), random.Random(3)
    slice_ = SequenceSlice(np.array(PROMPT), 0, TABLE)
    logits = sequence.model.forward([slice_], sequence.caches)[0]
    (right,) = sequence.model.guess([slice_], [7], sequence.caches)
    last = SequenceSlice(np.array(PROMPT[-1:]), len(PROMPT) - 1, TABLE)
    assert sequence.model.guess([last], [7], sequence.caches) == [right]
    assert sequence.model.guess([last], [None], sequence.caches) == [None]
    for _ in range(300):
        rows = sequence.bytes[-1 - rng.randrange(len(sequence.model._layers[0]))]
        block, at, bit = rng.randrange(18), rng.randrange(rows.shape[1]), 1 << rng.randrange(8)
        rows[block, at] ^= bit
        assert sequence.model.guess([last], [7], sequence.caches) != [right]
        assert np.array_equal(sequence.model.forward([last], sequence.caches)[0], logits)
        rows[block, at] ^= bit


@pytest.mark.parametrize(("layout", "size"), [("gqa", 2), ("gqa fp8", 4), ("mla", 2), ("dsa", 3)])
def test_ranks_compute_the_tokens_of_one_rank_and_notice_a_fault_on_any(layout, size):
    family, dtype = LAYOUTS[layout]
    prompt = PROMPT[:148]  # what follows is not guessable
    expected = [int(Sequence(layout).compute(prompt, 0).argmax())]
    config = ChecksumConfig(family, num_layers=3, num_draft_layers=1, guessable=True)
    groups = rank_group(size)
    backend = config.shard(size).cache_backend(block_size=BLOCK, dtype=dtype)
    caches = [list(backend.create_kv_cache(NUM_BLOCKS).values()) for _ in groups]
    models = [ChecksumModel(config, backend.layout, ranks=ranks) for ranks in groups]

    def on_all(call):
        with ThreadPoolExecutor(size) as threads:
            return list(threads.map(call, models, caches))

    whole = SequenceSlice(np.array(prompt), 0, TABLE)
    last = SequenceSlice(np.array(prompt[-1:]), len(prompt) - 1, TABLE)

    def tokens(slice_):
        return [int(logits.argmax()) for (logits,) in on_all(lambda model, cache: model.forward([slice_], cache))]

    def guesses():
        return on_all(lambda model, cache: model.guess([last], expected, cache))

    assert tokens(whole) == expected * size
    on_all(lambda model, cache: model.guess([whole], expected, cache))
    right = guesses()
    for rank in range(size):
        for number, cache in enumerate(caches[rank]):
            first = as_array(cache, "u1").reshape(-1)
            first[17] ^= 4
            layer = number // len(backend.layout.roles)
            assert (tokens(last) == expected * size) == (layer == 3)
            assert (guesses() == right) == (layer < 2), "it reads the last layer's rows and the draft's"
            first[17] ^= 4
    for group in groups:
        group.close()


def test_slices_and_sizes_that_do_not_fit_are_refused():
    sequence = Sequence("gqa")
    for tokens, start, table, said in (
        ([], 0, [0], "at least one token"),
        ([1] * 9, 0, [0], "1 blocks of 8 do not cover 9 tokens"),
        ([1], 0, [NUM_BLOCKS], "block ids must be in"),
        ([1], 40_000, [0] * 9000, "beyond the model's 32768"),
    ):
        with pytest.raises(ValueError, match=said):
            sequence.compute(tokens, start, table)
    with pytest.raises(ValueError, match="3 layers of 2 roles got 5 caches"):
        sequence.model.forward([SequenceSlice(np.array([1]), 0, [0])], sequence.caches[:5])
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 must divide the model's num_kv_heads 4"):
        sequence.model.config.shard(3)
