"""The layouts of latent and of sparse attention."""

import pytest

from fastdeploy_kvcache_v1.attention.dsa import DSACacheBackend
from fastdeploy_kvcache_v1.attention.mla import MLACacheBackend
from fastdeploy_kvcache_v1.errors import ConfigError


@pytest.mark.parametrize(
    ("backend", "block_bytes", "shapes"),
    [
        (MLACacheBackend(2, 512, 64, 4, "bfloat16"), 2 * (4 * 576 * 2), {"key_0": [1, 4, 576], "key_1": [1, 4, 576]}),
        (DSACacheBackend(1, 512, 64, 128, 4), 4 * (656 + 132), {"key_0": [1, 4, 656], "indexer_0": [4, 132]}),
    ],
)
def test_tensors_of_each_layer(backend, block_bytes, shapes):
    assert backend.layout.block_bytes == block_bytes
    names = {name.replace("_", "_caches_") + "_rank0.device0": [3, *shape] for name, shape in shapes.items()}
    assert {name: tensor.shape for name, tensor in backend.create_kv_cache(3).items()} == names


@pytest.mark.parametrize(("rank", "index"), [(500, 128), (512, 100), (0, 128)])
def test_dsa_quantizes_in_blocks(rank, index):
    with pytest.raises(ConfigError, match="multiple of 128"):
        DSACacheBackend(1, rank, 64, index, 4)
