"""Whatever decides a block's bytes decides its namespace."""

import json

import pytest

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.storage.namespace import FORMAT_VERSION, block_key
from tests.storage.values import block_hash, namespace


@pytest.mark.parametrize(
    "change",
    [
        {"model": "n"},
        {"weight_epoch": "1"},
        {"layout": CacheLayout(3, (RoleSpec("key", (2, 4, 8), "float32"),))},
        {"layout": CacheLayout(2, (RoleSpec("key", (2, 4, 8), "float16"),))},
        {"layout": CacheLayout(2, (RoleSpec("key", (4, 2, 8), "float32"),))},
        {"layout": CacheLayout(2, (RoleSpec("value", (2, 4, 8), "float32"),))},
        {"block_size": 8},
        {"tensor_parallel_size": 2},
        {"implementation": "other"},
        {"hash_version": "2"},
        {"num_parts": 2},
        {"format_version": FORMAT_VERSION + 1},
    ],
)
def test_each_setting_makes_another_namespace(change):
    assert namespace(**change).digest != namespace().digest


def test_the_same_settings_make_the_same_namespace():
    assert namespace().digest == namespace().digest
    assert len(namespace().digest) == 32
    assert json.loads(namespace().manifest())["layout"]["num_layers"] == 2


def test_parts_of_a_block_have_keys_of_their_own():
    first, second = block_hash(1), block_hash(2)
    names = [block_key(first, 0), block_key(first, 1), block_key(second, 0)]
    assert len(set(names)) == len(names)
    assert all(name.startswith(first.hex()) for name in names[:2])
