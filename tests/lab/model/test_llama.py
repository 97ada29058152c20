"""Llama, Qwen2 and Qwen3 against an independent float64 implementation, and against themselves to the last bit."""

import gc
import json
import os
import subprocess
import sys

import numpy as np
import paddle
import pytest
from safetensors.paddle import save_file

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.lab.model import llama, load_model_config
from fastdeploy_kvcache_v1.lab.model.llama import Llama, rope_tables
from fastdeploy_kvcache_v1.lab.model.step import SequenceSlice
from fastdeploy_kvcache_v1.lab.model.tensors import as_array, step_tensor

from .model_dirs import BASE, random_tensors, write_model
from .reference import reference_logits

LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3_ROPE |= {"original_max_position_embeddings": 64}
QWEN2 = {"architectures": ["Qwen2ForCausalLM"]}
VARIANTS = {
    "llama": {},
    "llama-mha-tied": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "llama-head-dim": {"head_dim": 10, "rms_norm_eps": 1e-2},
    "llama-rope-llama3": {"rope_scaling": LLAMA3_ROPE, "rope_theta": 500.0, "head_dim": 16},
    "llama-rope-parameters": {"rope_theta": None, "rope_parameters": LLAMA3_ROPE | {"rope_theta": 300.0}},
    "llama-one-kv-head": {"num_key_value_heads": 1},
    "qwen2": QWEN2 | {"tie_word_embeddings": True, "rope_theta": 1e6},
    "qwen2-sliding-window-off": QWEN2 | {"use_sliding_window": False, "sliding_window": 32},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 16, "attention_bias": False},
}


def new_caches(config, num_blocks=64, block_size=16, dtype="float32"):
    shape = [num_blocks, config.num_kv_heads, block_size, config.head_dim]
    return [paddle.zeros(shape, dtype=dtype) for _ in range(2 * config.num_layers)]


def every_logit(decoder, token_ids):
    """Logits after each token: a prefill of 140 tokens, which spans two key segments, then one by one."""
    caches, table = new_caches(decoder.config), list(range(63, 40, -1))
    first = 140
    logits = decoder.forward([SequenceSlice(token_ids[:first], 0, table)], caches)
    for position in range(first, len(token_ids)):
        logits += decoder.forward([SequenceSlice(token_ids[position : position + 1], position, table)], caches)
    return np.concatenate(logits)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match_the_reference(variant, tmp_path):
    config = {key: value for key, value in (BASE | VARIANTS[variant]).items() if value is not None}
    tensors = random_tensors(config)
    path = write_model(tmp_path, tensors, config)
    decoder = Llama.load(path, load_model_config(path))
    token_ids = np.random.default_rng(1).integers(0, config["vocab_size"], 150)

    computed = every_logit(decoder, token_ids)

    expected = reference_logits(config, tensors, token_ids)[139:]
    np.testing.assert_allclose(computed, expected, atol=2e-4, rtol=2e-4)
    assert computed.argmax(-1).tolist() == expected.argmax(-1).tolist()


def test_default_head_width_is_that_of_hugging_face(tmp_path):
    for kind, head_dim in (("Llama", 24 // 4), ("Qwen2", 24 // 4), ("Qwen3", 128)):
        write_model(tmp_path, {}, BASE | {"architectures": [f"{kind}ForCausalLM"], "num_key_value_heads": None})
        config = load_model_config(tmp_path)
        assert (config.head_dim, config.num_kv_heads) == (head_dim, 4)


@pytest.mark.parametrize("default", ["bfloat16", "float16"])
def test_paddles_default_dtype_changes_nothing(default, tmp_path):
    """FastDeploy sets it in its workers, before they load the model."""
    path = write_model(tmp_path, random_tensors(BASE), BASE)
    config = load_model_config(path)
    token_ids = np.arange(150)
    expected = every_logit(Llama.load(path, config), token_ids)
    before = paddle.get_default_dtype()
    paddle.set_default_dtype(default)
    try:
        assert np.array_equal(every_logit(Llama.load(path, config), token_ids), expected)
    finally:
        paddle.set_default_dtype(before)


def test_position_tables_end_with_the_caches_whatever_the_model_says(tmp_path, monkeypatch):
    """Ten million positions are 6 GB of tables, and config.json may say anything."""
    made = []

    def tables(rope, head_dim, num_positions):
        made.append(num_positions)
        assert num_positions < 2000
        return rope_tables(rope, head_dim, num_positions)

    monkeypatch.setattr(llama, "rope_tables", tables)
    config = BASE | {"max_position_embeddings": 10_000_000}
    tensors = random_tensors(config)
    path = write_model(tmp_path, tensors, config)
    decoder = Llama.load(path, load_model_config(path))
    token_ids = np.random.default_rng(3).integers(0, 300, 40)
    for num_blocks in (3, 64, 64, 4):
        slice_ = SequenceSlice(token_ids, 0, [2, 1, 0])
        logits = decoder.forward([slice_], new_caches(decoder.config, num_blocks))[0]
        np.testing.assert_allclose(logits[0], reference_logits(config, tensors, token_ids)[-1], atol=2e-4, rtol=2e-4)
    assert made == [0, 3 * 16, 64 * 16], "longer when the caches are, never shorter"


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_shards_and_stored_dtypes_load_alike(shards, dtype, tmp_path):
    stored = {name: paddle.to_tensor(tensor).astype(dtype) for name, tensor in random_tensors(BASE).items()}
    path = write_model(tmp_path, {}, BASE)
    for shard in range(shards):
        save_file(dict(list(stored.items())[shard::shards]), path / f"model-{shard}.safetensors")
    decoder, token_ids = Llama.load(path, load_model_config(path)), np.arange(20)
    logits = decoder.forward([SequenceSlice(token_ids, 0, [1, 0])], new_caches(decoder.config))[0]
    rounded = {name: tensor.astype("float32").numpy() for name, tensor in stored.items()}
    np.testing.assert_allclose(logits[0], reference_logits(BASE, rounded, token_ids)[-1], atol=2e-4, rtol=2e-4)


WIDE = BASE | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
"""Widths that a vector register divides, as those of real models."""

needs_avx2 = pytest.mark.skipif(os.environ.get("MKL_CBWR") != "AVX2,STRICT", reason="needs AVX2")


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    path = write_model(tmp_path_factory.mktemp("wide"), random_tensors(WIDE), WIDE)
    return Llama.load(path, load_model_config(path))


@needs_avx2
@pytest.mark.parametrize("block", [4, 16])
def test_chunks_batches_and_block_tables_change_no_bit(wide, block):
    """Each sequence alone, a token at a time, and then in any chunks, batches and slots; one starts in another's."""
    rng = np.random.default_rng(block)
    prompts = [rng.integers(0, WIDE["vocab_size"], length) for length in (300, 150, 130, 31)]
    prompts[1][:128] = prompts[0][:128]
    alone = []
    for ids in prompts:
        caches, table = new_caches(wide.config, 300 // block + 1, block), list(range(300 // block + 1))
        alone.append([wide.forward([SequenceSlice(ids[i : i + 1], i, table)], caches)[0] for i in range(len(ids))])
    num_blocks = 720 // block
    spare = rng.permutation(num_blocks).tolist()
    tables = [[spare.pop() for _ in range(-(-len(ids) // block))] for ids in prompts]
    tables[1][: 128 // block] = tables[0][: 128 // block]
    caches, done = [cache + float("nan") for cache in new_caches(wide.config, num_blocks, block)], [0, 0, 0, 0]
    while any(done[i] < len(prompts[i]) for i in range(4)):
        done[1] = max(done[1], 128) if done[0] >= 128 else 0
        chosen = [i for i in range(4) if done[i] < len(prompts[i]) and rng.random() < 0.8 and (i != 1 or done[1])]
        ends = [min(len(prompts[i]), done[i] + int(rng.choice([1, 30, 100]))) for i in chosen]
        pieces = zip(chosen, ends, strict=True)
        slices = [SequenceSlice(prompts[i][done[i] : end], done[i], tables[i]) for i, end in pieces]
        for i, end, logits in zip(chosen, ends, wide.forward(slices, caches), strict=True):
            done[i] = end
            assert logits.tobytes() == alone[i][end - 1].tobytes(), (i, end)


@pytest.mark.parametrize(
    ("ids", "start", "table", "said"),
    [
        ([0] * 17, 0, [0], "1 blocks of 16 do not cover 17 tokens"),
        ([500], 0, [0], "token ids must be in"),
        ([2**62], 0, [0], "token ids must be in"),
        ([-1], 0, [0], "token ids must be in"),
    ],
)
def test_slices_that_do_not_fit_are_refused(wide, ids, start, table, said):
    with pytest.raises(ValueError, match=said):
        wide.forward([SequenceSlice(np.array(ids), start, table)], new_caches(wide.config, 2))


def test_what_only_the_random_model_can_is_refused(wide):
    with pytest.raises(ConfigError, match="--tensor-parallel-size 2 is for --model random"):
        wide.config.shard(2)
    with pytest.raises(ConfigError, match="a cache of bfloat16 is for --model random"):
        wide.config.cache_backend(block_size=8, dtype="bfloat16")


DIGEST = """
import json, os, sys, zlib
from pathlib import Path
from fastdeploy_kvcache_v1.lab.model import configure_reproducible_math, load_model_config
configure_reproducible_math(int(sys.argv[1]))
import numpy as np
import paddle
from fastdeploy_kvcache_v1.lab.model.llama import Llama
from fastdeploy_kvcache_v1.lab.model.step import SequenceSlice
path = Path(sys.argv[2])
model = Llama.load(path, load_model_config(path))
caches = [paddle.zeros([5, 2, 64, 64]) for _ in range(4)]
logits = [model.forward([SequenceSlice(np.arange(n), at, range(5))], caches)[0] for at, n in [(0, 290), (290, 3)]]
print(json.dumps([zlib.crc32(np.stack(logits).tobytes()), len(os.listdir("/proc/self/task"))]))
"""


@pytest.mark.process
@needs_avx2
def test_a_second_thread_changes_no_bit(tmp_path):
    config = BASE | {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 512}
    path = write_model(tmp_path, random_tensors(config), config)
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MKL_", "OMP_"))}
    seen = []
    for threads in "12":
        command = [sys.executable, "-c", DIGEST, threads, str(path)]
        done = subprocess.run(command, env=clean, capture_output=True, text=True, check=True, timeout=120)
        seen.append(json.loads(done.stdout))
    (one, threads_of_one), (two, threads_of_two) = seen
    assert threads_of_two > threads_of_one, "the second thread is there"
    assert two == one


# ---- the tensors that every step makes anew: right, and gone afterwards


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
@pytest.mark.parametrize("values", [[], [3], [[1, 2], [3, 4]]])
def test_step_tensor_is_a_copy_of_its_values(values, dtype):
    array = np.array(values, dtype=dtype).T  # not contiguous
    tensor = step_tensor(array)
    expected = array.copy()
    array[...] = -1
    assert tensor.numpy().dtype == dtype
    np.testing.assert_array_equal(tensor.numpy(), expected)


def test_an_array_shares_the_memory_of_its_tensor_and_keeps_it():
    tensor = step_tensor(np.zeros((2, 3), dtype=np.float32))
    array = as_array(tensor)
    array[1, 2] = 5
    assert tensor.numpy().tolist() == [[0, 0, 0], [0, 0, 5]]
    tensor.fill_(7)
    del tensor
    gc.collect()
    others = [step_tensor(np.ones((2, 3), dtype=np.float32)) for _ in range(10)]
    assert array.tolist() == [[7] * 3] * 2, len(others)


def test_steps_leave_no_objects_behind(tmp_path):
    path = write_model(tmp_path, random_tensors(BASE), BASE)
    model = Llama.load(path, load_model_config(path))
    caches = new_caches(model.config, 4)

    def steps(count):
        for position in range(count):
            slice_ = SequenceSlice(np.array([position], dtype=np.int64), position, [0, 1, 2, 3], True)
            model.forward([slice_], caches, lambda layer: None)
        gc.collect()
        return len(gc.get_objects())

    before = steps(10)
    assert steps(60) - before < 60, "something is kept per step"
