"""Logits and KV of a token are the same bits however it was computed.

The baseline decodes every sequence alone, one token at a time. Everything else must reproduce it exactly.
"""

from dataclasses import dataclass, replace

import numpy as np
import paddle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastdeploy_kvcache_v1.model import ModelConfig, load_model_config
from fastdeploy_kvcache_v1.model.decoder import Decoder, SequenceSlice

# Sizes that no vector register divides, query and key norms, biases, a group of three.
ODD_MODEL = ModelConfig(
    architecture="qwen3",
    num_layers=2,
    hidden_size=20,
    intermediate_size=27,
    num_heads=6,
    num_kv_heads=2,
    head_dim=6,
    vocab_size=101,
    max_position=1024,
    qkv_bias=True,
    output_bias=True,
    qk_norm=True,
    tie_word_embeddings=True,
    seed=5,
)
MODELS = ("random", "odd", "odd, any rows")
DTYPES = ("float32", "float16", "bfloat16")
LENGTHS = (290, 131, 64, 9)


@dataclass
class Baseline:
    """Per sequence: token ids, logits after every token, and every layer's KV rows."""

    decoder: Decoder
    dtype: str
    token_ids: list[np.ndarray]
    logits: list[np.ndarray]
    """`[n, vocab]` each."""
    rows: list[np.ndarray]
    """`[2 * num_layers, n, num_kv_heads, head_dim]` each."""


def make_caches(config, dtype, *, num_blocks, block_size):
    """Full of NaN, like memory that nobody has written yet may be."""
    shape = [num_blocks, config.num_kv_heads, block_size, config.head_dim]
    return [paddle.full(shape, float("nan"), dtype=dtype) for _ in range(2 * config.num_layers)]


def read_rows(caches, table, end):
    """`[2 * num_layers, end, num_kv_heads, head_dim]` float32 through the block table."""
    whole = np.stack([cache.astype("float32").numpy() for cache in caches])
    picked = whole[:, np.asarray(table)].transpose(0, 1, 3, 2, 4)
    return picked.reshape(len(caches), -1, *picked.shape[3:])[:, :end]


def same_bits(left, right):
    return np.array_equal(left.view(np.uint32), right.view(np.uint32))


@pytest.fixture(scope="module")
def baseline():
    """By model name and dtype, computed on demand."""
    models = {
        "random": Decoder.load(None, replace(load_model_config(None), num_layers=2)),
        "odd": Decoder.load(None, ODD_MODEL),
        "odd, any rows": Decoder.load(None, replace(ODD_MODEL, intermediate_size=32)),
    }
    computed = {}

    def get(model, dtype):
        if (model, dtype) not in computed:
            computed[model, dtype] = compute_baseline(models[model], dtype)
        return computed[model, dtype]

    return get


def compute_baseline(decoder, dtype):
    rng = np.random.default_rng(3)
    token_ids = [rng.integers(0, decoder.config.vocab_size, length) for length in LENGTHS]
    # The last two share a prefix with the first.
    token_ids[2][:40] = token_ids[0][:40]
    token_ids[3][:8] = token_ids[0][:8]
    result = Baseline(decoder, dtype, token_ids, [], [])
    for ids in token_ids:
        caches = make_caches(decoder.config, dtype, num_blocks=20, block_size=16)
        table = list(range(20))
        logits = [
            decoder.forward([SequenceSlice(ids[p : p + 1], p, table)], caches, lambda layer: None)[0]
            for p in range(len(ids))
        ]
        result.logits.append(np.stack(logits))
        result.rows.append(read_rows(caches, table, len(ids)).copy())
    return result


class Run:
    """The baseline's sequences again, in another memory layout, advanced by arbitrary slices."""

    def __init__(self, baseline, *, block_size, rng):
        self.baseline = baseline
        counts = [-(-length // block_size) for length in LENGTHS]
        spare = 3
        order = rng.permutation(sum(counts) + spare).tolist()
        self.tables = [[order.pop() for _ in range(count)] for count in counts]
        self.spare_blocks = order
        config = baseline.decoder.config
        self.caches = make_caches(config, baseline.dtype, num_blocks=sum(counts) + spare, block_size=block_size)
        self.done = [0] * len(LENGTHS)

    def step(self, advances, before_layer=None):
        """`advances`: (sequence, tokens) pairs. Checks every logit against the baseline."""
        slices, ends = [], []
        for index, count in advances:
            start = self.done[index]
            ids = self.baseline.token_ids[index][start : start + count]
            slices.append(SequenceSlice(ids, start, self.tables[index], needs_logits=count % 3 != 0))
            self.done[index] = start + len(ids)
            ends.append(self.done[index])
        results = self.baseline.decoder.forward(slices, self.caches, before_layer)
        for (index, _), piece, end, logits in zip(advances, slices, ends, results, strict=True):
            assert (logits is not None) == piece.needs_logits
            if logits is not None:
                assert same_bits(logits, self.baseline.logits[index][end - 1]), (index, piece.start, end)

    def check_rows(self):
        """What was computed is in the cache, bit for bit; every other slot is as untouched as before."""
        config, block_size = self.baseline.decoder.config, self.caches[0].shape[2]
        for index, end in enumerate(self.done):
            table = self.tables[index]
            rows = read_rows(self.caches, table, len(table) * block_size)
            assert same_bits(rows[:, :end].copy(), self.baseline.rows[index][:, :end].copy()), index
            assert np.isnan(rows[:, end:]).all(), index
        spare = np.stack([cache.astype("float32").numpy()[self.spare_blocks] for cache in self.caches])
        assert spare.shape[0] == 2 * config.num_layers
        assert np.isnan(spare).all()


def advance_randomly(run, rng, max_chunk):
    while open_sequences := [i for i, done in enumerate(run.done) if done < LENGTHS[i]]:
        size = rng.integers(1, len(open_sequences) + 1)
        chosen = rng.permutation(open_sequences)[:size]
        run.step([(int(index), int(rng.integers(1, max_chunk + 1))) for index in chosen])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("block_size", [1, 7, 64, 300])
def test_chunks_batches_and_layouts_change_nothing(baseline, model, dtype, block_size):
    rng = np.random.default_rng(block_size)
    for max_chunk in (290, 40):
        run = Run(baseline(model, dtype), block_size=block_size, rng=rng)
        advance_randomly(run, rng, max_chunk)
        run.check_rows()


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    block_size=st.integers(1, 150),
    max_chunk=st.integers(1, 300),
    steps=st.integers(1, 6),
    model=st.sampled_from(MODELS),
)
def test_any_few_steps_agree_with_the_baseline(baseline, seed, block_size, max_chunk, steps, model):
    rng = np.random.default_rng(seed)
    run = Run(baseline(model, "float32"), block_size=block_size, rng=rng)
    for _ in range(steps):
        waiting = [i for i, done in enumerate(run.done) if done < LENGTHS[i]]
        if waiting:
            run.step(
                [(i, int(rng.integers(1, max_chunk + 1))) for i in waiting if rng.random() < 0.7] or [(waiting[0], 1)]
            )
    run.check_rows()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_prefix_from_somebody_elses_blocks_is_as_good(baseline, dtype):
    """Sequence 2 continues on blocks that sequence 0 computed, in the same batch as sequence 0 itself."""
    run = Run(baseline("random", dtype), block_size=8, rng=np.random.default_rng(0))
    run.step([(0, 41)])
    run.tables[2][:5] = run.tables[0][:5]
    run.done[2] = 40
    run.step([(2, 24), (0, 100), (1, 5)])
    run.check_rows()


def test_a_prefix_may_arrive_while_the_layers_before_it_run(baseline):
    """`before_layer` brings each layer's prefix in at the last moment: nothing of it was read earlier."""
    base = baseline("random", "float32")
    source = Run(base, block_size=8, rng=np.random.default_rng(1))
    source.step([(0, 160)])
    run = Run(base, block_size=8, rng=np.random.default_rng(2))
    run.done[0] = 160
    calls = []

    def before_layer(layer):
        calls.append(layer)
        for tensor in (2 * layer, 2 * layer + 1):
            for position in range(0, 160, 8):
                slots = source.tables[0][position // 8], run.tables[0][position // 8]
                run.caches[tensor][slots[1]] = source.caches[tensor][slots[0]]

    run.step([(1, 20), (0, 7)], before_layer)
    run.check_rows()
    assert calls == list(range(base.decoder.config.num_layers))


def test_the_same_slices_can_be_computed_again_after_a_failed_copy(baseline):
    run = Run(baseline("random", "float32"), block_size=16, rng=np.random.default_rng(4))
    run.step([(1, 50)])

    def fail(layer):
        if layer == 1:
            raise OSError("copy failed")

    with pytest.raises(OSError, match="copy failed"):
        run.step([(1, 20), (2, 30)], fail)
    run.done[1:3] = [50, 0]
    run.step([(2, 30)])
    run.step([(1, 20)])
    run.check_rows()


@pytest.mark.parametrize(
    ("piece", "message"),
    [
        (SequenceSlice(np.zeros(0, dtype=np.int64), 0, [0]), "at least one token"),
        (SequenceSlice(np.zeros(1, dtype=np.int64), -1, [0]), "at least one token"),
        (SequenceSlice(np.zeros(9, dtype=np.int64), 0, [0]), "1 blocks of 8 do not cover 9 tokens"),
        (SequenceSlice(np.array([500]), 0, [0]), "token ids must be in"),
        (SequenceSlice(np.array([-1]), 0, [0]), "token ids must be in"),
        (SequenceSlice(np.array([1]), 0, [2]), "block ids must be in"),
        (SequenceSlice(np.array([1]), 1024, list(range(2)) * 100), "position 1024 is beyond the model's 1024"),
    ],
)
def test_slices_that_do_not_fit_are_refused(baseline, piece, message):
    decoder = baseline("odd", "float32").decoder
    caches = make_caches(decoder.config, "float32", num_blocks=2, block_size=8)
    with pytest.raises(ValueError, match=message):
        decoder.forward([piece], caches)
    assert all(np.isnan(cache.numpy()).all() for cache in caches)


def test_no_slices_need_no_work(baseline):
    assert baseline("odd", "float32").decoder.forward([], []) == []
