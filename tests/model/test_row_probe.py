"""The probe tells libraries apart, and the decoder does as it says."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import paddle
import pytest

from fastdeploy_kvcache_v1.model import attention_dsa, attention_gqa, layers, load_model_config, row_probe
from fastdeploy_kvcache_v1.model.decoder import Decoder
from fastdeploy_kvcache_v1.model.plan import ANY_ROWS, FIXED_TILES, SEGMENT

CONFIG = replace(load_model_config(None), num_layers=1)

WHICH_CUT = (
    "import json\n"
    "from fastdeploy_kvcache_v1.model import configure_reproducible_math, load_model_config\n"
    "configure_reproducible_math()\n"
    "from fastdeploy_kvcache_v1.model.decoder import Decoder\n"
    "print(json.dumps(Decoder.load(None, load_model_config(None)).cut.align))"
)


def run(code, **environment):
    """What `code` prints in a process of its own, with MKL as `environment` says; and its log."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MKL_", "OMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=True, timeout=120
    )
    return json.loads(done.stdout), done.stderr


needs_avx2 = pytest.mark.skipif(os.environ.get("MKL_CBWR") != "AVX2,STRICT", reason="needs AVX2")


@needs_avx2
def test_the_strict_mode_computes_rows_together():
    assert Decoder.load(None, CONFIG).cut is ANY_ROWS


@pytest.mark.process
@needs_avx2
def test_a_mode_whose_rows_depend_on_each_other_gets_fixed_tiles_and_says_so():
    align, log = run(WHICH_CUT, MKL_CBWR="COMPATIBLE")
    assert align == FIXED_TILES.align
    assert "8 rows at a time" in log


def test_widths_that_no_register_divides_get_fixed_tiles():
    assert Decoder.load(None, replace(CONFIG, intermediate_size=24)).cut is FIXED_TILES


def one_bit_off_in(few_rows, bit=0):
    """A product of which one bit is another one when it has few rows."""

    def product(x, weight, bias=None):
        result = exact_linear(x, weight, bias)
        if x.shape[0] == few_rows:
            array = result.numpy()
            array.view(np.uint32)[-1, -1] ^= 1 << bit
            result = paddle.to_tensor(array)
        return result

    return product


exact_linear = layers.linear


@needs_avx2
@pytest.mark.parametrize("rows", [1, 3, 8, 61])
@pytest.mark.parametrize(("module", "bit"), [(attention_gqa, 0), (layers, 8), (row_probe, 0)])
def test_one_bit_of_one_product_is_found(module, bit, rows, monkeypatch):
    """Before attention, behind it, where a sum may swallow the last bit, and in the product with the vocabulary."""
    monkeypatch.setattr(module, "linear", one_bit_off_in(rows, bit))
    assert Decoder.load(None, CONFIG).cut is FIXED_TILES


@needs_avx2
@pytest.mark.parametrize("family", ["mla", "dsa"])
def test_other_families_compute_rows_together(family):
    assert Decoder.load(None, load_model_config(None, family)).cut is ANY_ROWS


@needs_avx2
@pytest.mark.parametrize("rows", [3, 61])
def test_one_bit_of_the_indexer_is_found(rows, monkeypatch):
    def scores(queries, keys, head_weights):
        result = attention_dsa.index_scores(queries, keys, head_weights)
        if len(result) == rows:
            result.view(np.uint32)[0, 0] ^= 1
        return result

    monkeypatch.setattr(row_probe, "index_scores", scores)
    assert Decoder.load(None, load_model_config(None, "dsa")).cut is FIXED_TILES


@needs_avx2
@pytest.mark.parametrize("num_keys", [segments * SEGMENT for segments in row_probe.KEY_SEGMENTS])
def test_one_bit_of_attention_is_found(num_keys, monkeypatch):
    def attend(queries, keys, values, mask):
        result = layers.attend(queries, keys, values, mask)
        if keys.shape[1] == num_keys and queries.shape[1] == 7 * CONFIG.num_heads // CONFIG.num_kv_heads:
            array = result.numpy()
            array.view(np.uint32)[0, 0, 0] ^= 1
            result = paddle.to_tensor(array)
        return result

    monkeypatch.setattr(row_probe, "attend", attend)
    assert Decoder.load(None, CONFIG).cut is FIXED_TILES


DIGEST = (
    "import json, os, zlib\n"
    "import numpy as np\n"
    "from fastdeploy_kvcache_v1.model import ModelConfig, configure_reproducible_math\n"
    "configure_reproducible_math({threads})\n"
    "import paddle\n"
    "from fastdeploy_kvcache_v1.model.decoder import Decoder, SequenceSlice\n"
    "config = ModelConfig(architecture='llama', num_layers=1, hidden_size=256, intermediate_size=512, num_heads=4,\n"
    "                     num_kv_heads=2, head_dim=64, vocab_size=512, max_position=1024)\n"
    "decoder = Decoder.load(None, config)\n"
    "caches = [paddle.zeros([5, 2, 64, 64]) for _ in range(2)]\n"
    "slices = [(0, 290), (290, 1), (291, 3)]\n"
    "logits = [decoder.forward([SequenceSlice(np.arange(n), at, range(5))], caches)[0] for at, n in slices]\n"
    "print(json.dumps([zlib.crc32(np.stack(logits).tobytes()), len(os.listdir('/proc/self/task'))]))"
)


@pytest.mark.process
@needs_avx2
def test_a_second_thread_changes_no_bit():
    (one, threads_of_one), (two, threads_of_two) = (run(DIGEST.format(threads=number))[0] for number in (1, 2))
    assert threads_of_two > threads_of_one, "the second thread is there"
    assert two == one
