"""Attention families by name: geometry in, layout out."""

import inspect
from dataclasses import fields

import pytest

from fastdeploy_kvcache_v1.attention.dsa import DSACacheBackend
from fastdeploy_kvcache_v1.attention.geometry import CacheGeometry
from fastdeploy_kvcache_v1.attention.gqa import GQACacheBackend
from fastdeploy_kvcache_v1.attention.mla import MLACacheBackend
from fastdeploy_kvcache_v1.attention.registry import FAMILIES, OF_EVERY_FAMILY, make_cache_backend, needed_numbers
from fastdeploy_kvcache_v1.errors import ConfigError

NUMBERS = {"num_kv_heads": 2, "head_dim": 8, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}


def geometry(**numbers):
    return CacheGeometry(num_layers=3, block_size=4, dtype="bfloat16", **numbers)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("gqa", GQACacheBackend(3, 2, 8, 4, "bfloat16")),
        ("mla", MLACacheBackend(3, 512, 64, 4, "bfloat16")),
        ("dsa", DSACacheBackend(3, 512, 64, 128, 4)),
    ],
)
def test_a_family_takes_its_numbers_out_of_a_geometry_that_has_all(family, expected):
    made = make_cache_backend(family, geometry(**NUMBERS))
    assert type(made) is type(expected)
    assert made.layout == expected.layout


def test_scales_are_cached_where_the_geometry_says_their_type():
    made = make_cache_backend("gqa", geometry(num_kv_heads=2, head_dim=8, scale_dtype="float32"))
    assert made.layout == GQACacheBackend(3, 2, 8, 4, "bfloat16", scale_dtype="float32").layout


@pytest.mark.parametrize("family", FAMILIES)
def test_a_constructor_takes_fields_of_the_geometry_only(family):
    known = {field.name for field in fields(CacheGeometry)}
    assert set(inspect.signature(FAMILIES[family]).parameters) <= known
    assert set(OF_EVERY_FAMILY) <= known


@pytest.mark.parametrize("family", FAMILIES)
def test_every_number_that_is_missing_is_named(family):
    names = needed_numbers(family)
    with pytest.raises(ConfigError, match=f"attention family {family} needs {', '.join(names)}, which the model's"):
        make_cache_backend(family, geometry())
    given = {name: NUMBERS[name] for name in names[1:]}
    with pytest.raises(ConfigError, match=f"needs {names[0]}, which"):
        make_cache_backend(family, geometry(**given))


@pytest.mark.parametrize("ask", [needed_numbers, lambda family: make_cache_backend(family, geometry(**NUMBERS))])
def test_an_unknown_family_names_those_that_exist(ask):
    with pytest.raises(ConfigError, match="unknown attention family 'rwkv': choose one of gqa, mla, dsa"):
        ask("rwkv")
