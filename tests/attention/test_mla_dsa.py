"""The layouts of latent and of sparse attention."""

import pytest

from fastdeploy_kvcache_v1.attention.dsa import DSACacheBackend
from fastdeploy_kvcache_v1.attention.mla import MLACacheBackend
from fastdeploy_kvcache_v1.errors import ConfigError


def test_mla_has_one_tensor_per_layer():
    backend = MLACacheBackend(2, 512, 64, 4, "bfloat16")
    assert backend.layout.block_bytes == 2 * (4 * 576 * 2)
    tensors = backend.create_kv_cache(3)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {
        "key_caches_0_rank0.device0": [3, 1, 4, 576],
        "key_caches_1_rank0.device0": [3, 1, 4, 576],
    }


def test_dsa_has_a_latent_and_an_indexer_tensor_per_layer():
    backend = DSACacheBackend(1, 512, 64, 128, 4)
    assert backend.layout.block_bytes == 4 * (656 + 132)
    assert {name: tensor.shape for name, tensor in backend.create_kv_cache(3).items()} == {
        "key_caches_0_rank0.device0": [3, 1, 4, 656],
        "indexer_caches_0_rank0.device0": [3, 4, 132],
    }


@pytest.mark.parametrize(("rank", "index"), [(500, 128), (512, 100), (0, 128)])
def test_dsa_quantizes_in_blocks(rank, index):
    with pytest.raises(ConfigError, match="multiple of 128"):
        DSACacheBackend(1, rank, 64, index, 4)
