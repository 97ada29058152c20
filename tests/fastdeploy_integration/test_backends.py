"""`create_kv_cache` against FAKE backends with the attributes and shapes of FastDeploy's."""

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import backends


class AppendAttentionBackend:
    kv_num_heads, head_dim, block_size = 2, 8, 4

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        shape = [max_num_blocks, 2, 4, 4 if kv_cache_quant_type == "int4_zp" else 8]
        return shape, shape


class MLAAttentionBackend:
    kv_lora_rank, qk_rope_head_dim, block_size = 512, 64, 4

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        return [max_num_blocks, 1, 4, 576], []


class DSAAttentionBackend:
    kv_lora_rank, qk_rope_head_dim, index_head_dim, block_size = 512, 64, 128, 4

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        return [max_num_blocks, 1, 4, 656], [], [max_num_blocks, 4, 132]


@pytest.mark.parametrize(
    ("backend", "quant_type", "shapes", "dtypes"),
    [
        (AppendAttentionBackend, None, [[3, 2, 4, 8]] * 2, ["float32"] * 2),
        (AppendAttentionBackend, "int8", [[3, 2, 4, 8]] * 2, ["uint8"] * 2),
        (AppendAttentionBackend, "int4_zp", [[3, 2, 4, 4]] * 2, ["uint8"] * 2),
        (
            AppendAttentionBackend,
            "block_wise_fp8",
            [[3, 2, 4, 8]] * 2 + [[3, 2, 4]] * 2,
            ["uint8", "uint8", "float32", "float32"],
        ),
        (MLAAttentionBackend, None, [[3, 1, 4, 576]], ["float32"]),
        (DSAAttentionBackend, "uint8", [[3, 1, 4, 656], [3, 4, 132]], ["uint8"] * 2),
    ],
)
def test_tensors_of_each_layout(backend, quant_type, shapes, dtypes):
    made = backends.create_kv_cache(
        backend(), 3, 2, dtype="float32", quant_type=quant_type, rank=1, device=5, first_layer=7
    )
    tensors = list(made.values())
    assert [tensor.shape for tensor in tensors] == shapes * 2
    assert [str(tensor.dtype).rpartition(".")[2] for tensor in tensors] == dtypes * 2
    assert not any(tensor.numpy().any() for tensor in tensors)
    assert next(iter(made)) == "key_caches_7_rank1.device5"
    assert next(reversed(made)).rpartition("_")[0].endswith("_8")


def test_layouts_that_kernels_do_not_read_are_refused():
    with pytest.raises(ConfigError, match="MLA attention with block_wise_fp8"):
        backends.create_kv_cache(MLAAttentionBackend(), 1, 1, dtype="bfloat16", quant_type="block_wise_fp8")


def test_a_backend_whose_shape_drifted_is_refused():
    backend = AppendAttentionBackend()
    backend.get_kv_cache_shape = lambda max_num_blocks, kv_cache_quant_type: ([1, 4, 2, 8], [1, 4, 2, 8])
    with pytest.raises(ConfigError, match=r"AppendAttentionBackend wants cache blocks of \[\(1, 4, 2, 8\)"):
        backends.create_kv_cache(backend, 1, 1, dtype="bfloat16")
