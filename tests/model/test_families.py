"""Every attention family: against an independent float64 implementation, and the same bits however it is computed."""

from dataclasses import replace

import numpy as np
import paddle
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, ModelError
from fastdeploy_kvcache_v1.model import fp8
from fastdeploy_kvcache_v1.model.config import (
    RANDOM_LATENT,
    RANDOM_MODEL,
    RANDOM_MODELS,
    IndexerConfig,
    load_model_config,
)
from fastdeploy_kvcache_v1.model.decoder import Decoder, SequenceSlice
from fastdeploy_kvcache_v1.model.paged_cache import head_caches
from fastdeploy_kvcache_v1.model.plan import FIXED_TILES
from fastdeploy_kvcache_v1.model.tensors import as_array
from fastdeploy_kvcache_v1.model.weight_source import RandomSource
from fastdeploy_kvcache_v1.model.weights import read_decoder

from .family_reference import reference_logits

BLOCK = 16
LENGTHS = (300, 150, 20)
NUM_BLOCKS = 40

SMALL = {
    "gqa": replace(RANDOM_MODELS["gqa"], num_layers=2),
    "window": replace(RANDOM_MODELS["window"], num_layers=2, sliding_window=50),
    "mla": replace(RANDOM_MODELS["mla"], num_layers=2),
    "dsa": replace(RANDOM_MODELS["dsa"], num_layers=2, indexer=IndexerConfig(num_heads=3, head_dim=128, topk=24)),
}
CASES = [
    ("gqa", "float32"),
    ("gqa", "block_wise_fp8"),
    ("window", "float32"),
    ("window", "block_wise_fp8"),
    ("mla", "float32"),
    ("mla", "bfloat16"),
    ("dsa", "float32"),
]


ODD = replace(
    RANDOM_MODEL,
    **{"architecture": "qwen3", "num_layers": 2, "hidden_size": 20, "intermediate_size": 27, "num_heads": 6},
    **{"num_kv_heads": 2, "head_dim": 6, "vocab_size": 101, "seed": 5},
    **{"qkv_bias": True, "output_bias": True, "qk_norm": True, "tie_word_embeddings": True},
)
"""Sizes that no vector register divides, query and key norms, biases, a group of three."""

BIT_CASES = [
    # family, dtype of the cache, tokens per block
    *((family, dtype, BLOCK) for family, dtype in CASES),
    *(("odd", "float32", block) for block in (1, 7, 300)),
    ("odd", "float16", 64),
    ("odd", "bfloat16", 64),
]


class Recording(RandomSource):
    """Keeps what it gave."""

    def __init__(self, seed):
        super().__init__(seed)
        self.tensors = {}

    def read(self, name, shape):
        self.tensors[name] = super().read(name, shape)
        return self.tensors[name]


@pytest.fixture(scope="module")
def decoders():
    return {name: Decoder.load(None, config) for name, config in {**SMALL, "odd": ODD}.items()}


def bits(tensor):
    """The memory of a cache, as integers."""
    widths = {"paddle.uint8": 1, "paddle.bfloat16": 2, "paddle.float16": 2, "paddle.float32": 4}
    return as_array(tensor, f"u{widths[str(tensor.dtype)]}")


def caches_of(config, dtype, block=BLOCK, num_blocks=NUM_BLOCKS):
    """As memory that nobody has written may be: not a number, in any dtype."""
    tensors = list(config.cache_backend(block_size=block, dtype=dtype).create_kv_cache(num_blocks).values())
    for tensor in tensors:
        bits(tensor)[...] = np.iinfo(bits(tensor).dtype).max
    return tensors


def ids_of(config):
    rng = np.random.default_rng(7)
    return [rng.integers(0, config.vocab_size, length) for length in LENGTHS]


def written(caches, table, end, block=BLOCK):
    """What the slots of `end` tokens hold, as bytes, whatever the role's axes are."""
    rows = []
    for tensor in caches:
        blocks = bits(tensor)[table]
        by_token = np.moveaxis(blocks, list(tensor.shape[1:]).index(block) + 1, 1)
        rows.append(by_token.reshape(len(table) * block, -1)[:end].tobytes())
    return rows


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_logits_match_the_reference(family, dtype):
    config, source = SMALL[family], Recording(SMALL[family].seed)
    decoder = Decoder(read_decoder(source, config), config)
    ids = ids_of(config)[0]
    expected = reference_logits(config, source.tensors, ids, quantized=dtype == "block_wise_fp8")
    caches, table, found = caches_of(config, dtype), list(range(NUM_BLOCKS)), []
    for start, end in ((0, 129), (129, 290), *((at, at + 1) for at in range(290, 300))):
        logits = decoder.forward([SequenceSlice(ids[start:end], start, table)], caches)[0]
        found.append((end - 1, logits))
    tolerance = 0.2 if dtype == "bfloat16" else 2e-2 if dtype == "block_wise_fp8" or family == "dsa" else 1e-3
    for position, logits in found:
        np.testing.assert_allclose(logits, expected[position], atol=tolerance)


@pytest.mark.parametrize("cut", [None, FIXED_TILES], ids=["any rows", "tiles"])
@pytest.mark.parametrize(("family", "dtype", "block"), BIT_CASES)
def test_chunks_batches_and_block_tables_change_no_bit(decoders, family, dtype, block, cut):
    """Each sequence alone, a token at a time (or a tile), and then in any chunks, batches and slots."""
    decoder = decoders[family]
    config = decoder.config
    if cut is not None:
        decoder = Decoder(read_decoder(RandomSource(config.seed), config), config, cut)
    prompts, sizes = ids_of(config), [-(-length // block) for length in LENGTHS]
    step, num_blocks = (1 if cut is None else 30), sum(sizes) + 3
    baseline = []
    for ids in prompts:
        caches, table = caches_of(config, dtype, block, num_blocks), list(range(num_blocks))
        logits = {
            min(at + step, len(ids)): decoder.forward([SequenceSlice(ids[at : at + step], at, table)], caches)[0]
            for at in range(0, len(ids), step)
        }
        baseline.append((logits, written(caches, table, len(ids), block)))
    rng = np.random.default_rng(len(family) + block)
    spare = rng.permutation(num_blocks).tolist()
    tables = [[spare.pop() for _ in range(size)] for size in sizes]
    caches, done = caches_of(config, dtype, block, num_blocks), [0] * len(LENGTHS)
    untouched = [bits(tensor)[spare].tobytes() for tensor in caches]
    compared = 0
    while any(at < length for at, length in zip(done, LENGTHS, strict=True)):
        chosen = [i for i in range(len(LENGTHS)) if done[i] < LENGTHS[i] and rng.random() < 0.8]
        if not chosen:
            continue
        ends = [min(LENGTHS[i], done[i] + int(rng.choice([1, 30, 100]))) for i in chosen]
        slices = [
            SequenceSlice(prompts[i][done[i] : end], done[i], tables[i]) for i, end in zip(chosen, ends, strict=True)
        ]
        for i, end, logits in zip(chosen, ends, decoder.forward(slices, caches), strict=True):
            done[i] = end
            if end in baseline[i][0]:
                assert logits.tobytes() == baseline[i][0][end].tobytes(), (i, end)
                compared += 1
    assert compared >= len(LENGTHS)
    for i, length in enumerate(LENGTHS):
        assert written(caches, tables[i], length, block) == baseline[i][1], i
    assert [bits(tensor)[spare].tobytes() for tensor in caches] == untouched


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_prefix_from_somebody_elses_blocks_is_as_good(decoders, dtype):
    """In the same batch as the sequence that computed it."""
    config, decoder, ids = SMALL["gqa"], decoders["gqa"], ids_of(SMALL["gqa"])[0][:100]
    expected = decoder.forward([SequenceSlice(ids, 0, list(range(NUM_BLOCKS)))], caches_of(config, dtype))[0]
    caches = caches_of(config, dtype)
    decoder.forward([SequenceSlice(ids[:50], 0, list(range(10)))], caches)
    slices = [SequenceSlice(ids[50:], 50, list(range(10))), SequenceSlice(ids[48:], 48, [0, 1, 2, *range(20, 30)])]
    assert [logits.tobytes() for logits in decoder.forward(slices, caches)] == [expected.tobytes()] * 2


WRONG_SLICES = [
    # token ids, the first one's position, block table, what is said
    ([], 0, [0], "at least one token"),
    ([0], -1, [0], "at least one token"),
    ([0] * 17, 0, [0], "1 blocks of 16 do not cover 17 tokens"),
    ([500], 0, [0], "token ids must be in"),
    ([-1], 0, [0], "token ids must be in"),
    ([1], 0, [2], "block ids must be in"),
    ([1], ODD.max_position, list(range(2)) * 5000, f"position {ODD.max_position} is beyond the model's"),
]


@pytest.mark.parametrize(("ids", "start", "table", "said"), WRONG_SLICES, ids=lambda each: str(each)[:20])
def test_slices_that_do_not_fit_are_refused(decoders, ids, start, table, said):
    caches = caches_of(ODD, "float32", num_blocks=2)
    with pytest.raises(ValueError, match=said):
        decoders["odd"].forward([SequenceSlice(np.array(ids, dtype=np.int64), start, table)], caches)
    assert all(np.isnan(cache.numpy()).all() for cache in caches)


@pytest.mark.parametrize("dtype", ["float32", "block_wise_fp8"])
def test_blocks_behind_the_window_are_never_read(decoders, dtype):
    """They may hold anything, and be the blocks of others."""
    config, decoder, ids = SMALL["window"], decoders["window"], ids_of(SMALL["window"])[0]
    caches, table = caches_of(config, dtype), list(range(NUM_BLOCKS))
    expected = decoder.forward([SequenceSlice(ids, 0, table)], caches)[0]
    start = 260
    caches = caches_of(config, dtype)
    decoder.forward([SequenceSlice(ids[:start], 0, table)], caches)
    behind = (start - config.sliding_window + 1) // BLOCK
    assert behind > 10
    for tensor in caches:
        bits(tensor)[:behind] = np.iinfo(bits(tensor).dtype).max
    assert decoder.forward([SequenceSlice(ids[start:], start, table)], caches)[0].tobytes() == expected.tobytes()
    for tensor in caches:
        bits(tensor)[behind] = np.iinfo(bits(tensor).dtype).max
    spoiled = decoder.forward([SequenceSlice(ids[start:], start, table)], caches)[0]
    assert spoiled.tobytes() != expected.tobytes(), "the first block within the window is read"


def test_fp8_rounds_as_paddle_does():
    rng = np.random.default_rng(0)
    values = np.concatenate([rng.standard_normal(4000) * scale for scale in (1e-3, 0.02, 1, 100)])
    ties = np.concatenate([(fp8.decode(np.arange(c, c + 2, dtype=np.uint8)).mean(keepdims=True)) for c in range(126)])
    values = np.concatenate([values, ties, -ties, [0.0, -0.0, 448]]).astype(np.float32)
    values = values[np.abs(values) <= 448]
    expected = paddle.to_tensor(values).astype("float8_e4m3fn").astype("float32").numpy()
    np.testing.assert_array_equal(fp8.decode(fp8.encode(values)), expected)
    assert fp8.decode(fp8.encode(np.array([1e9, -1e9], np.float32))).tolist() == [448, -448], "it saturates"
    codes, scales = fp8.quantize(np.zeros((2, 8), np.float32))
    assert (fp8.dequantize(codes, scales) == 0).all()


def test_scales_lie_in_the_role_of_what_they_scale():
    """Swapped scales would serve this model as well, and no other reader of the cache."""
    key, value, key_scale, value_scale = caches_of(SMALL["gqa"], "block_wise_fp8")[:4]
    rows = np.full((1, SMALL["gqa"].head_dim), 448, np.float32)
    keys, values = head_caches([key, value, key_scale, value_scale])
    keys.write(paddle.to_tensor([0]), paddle.to_tensor(rows))
    values.write(paddle.to_tensor([0]), paddle.to_tensor(3 * rows))
    assert [float(each.numpy()[0, 0, 0]) for each in (key_scale, value_scale)] == [1, 3]
    assert np.isnan(as_array(key_scale)[0, 0, 1:]).all()
    assert [int(each.numpy()[0, 0, 0, 0]) for each in (key, value)] == [0x7E, 0x7E]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer": IndexerConfig(1, 128, 8)}, "an indexer needs latent attention"),
        ({"latent": RANDOM_LATENT}, "caches one head of 144 elements, got 4 of 16"),
        ({"sliding_window": 0}, "at least 1 token"),
    ],
)
def test_models_that_cannot_be_are_refused(changes, message):
    with pytest.raises(ModelError, match=message):
        replace(RANDOM_MODEL, **changes)


def test_what_does_not_fit_a_family_is_refused(tmp_path, decoders):
    with pytest.raises(ConfigError, match="cannot be cached as block_wise_fp8"):
        SMALL["mla"].cache_backend(block_size=BLOCK, dtype="block_wise_fp8")
    with pytest.raises(ValueError, match="2 layers need 4 or 8 caches, got 2"):
        decoders["gqa"].forward([SequenceSlice(np.array([1]), 0, [0])], caches_of(SMALL["mla"], "float32"))
    with pytest.raises(ModelError, match="--model-family mla is for --model random"):
        load_model_config(tmp_path, "mla")
    with pytest.raises(ModelError, match="unknown --model-family 'rwkv': choose one of gqa, window, mla, dsa"):
        load_model_config(None, "rwkv")
