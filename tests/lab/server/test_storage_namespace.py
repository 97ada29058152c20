"""Which settings of the embedded server are in the name of its stored blocks: each is known to be, or not to be."""

from dataclasses import fields, replace

import pytest

from fastdeploy_kvcache_v1.lab.server.serve import storage_namespace
from fastdeploy_kvcache_v1.lab.server.settings import ServerConfig
from tests.lab.server.test_settings import configure

DECIDES = {
    "model_path": None,  # see test_model_digest.py
    "cache": ("--block-size", "32"),
    "cache_dtype": ("--cache-dtype", "block_wise_fp8"),
    "model": ("--model-family", "mla"),
    "model's draft layer": ("--mtp",),
    "tensor_parallel_size": ("--tensor-parallel-size", "2"),
}
DOES_NOT = {
    *("served_model_name", "host", "port", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "log_level"),
    *("checks_model_name", "storage", "record_trace", "role", "strict_fields"),
    "threads",  # `configure_reproducible_math`
}


def name(config):
    return storage_namespace(config).digest


def test_each_setting_is_known_to_decide_the_name_or_not_to():
    assert {field.name for field in fields(ServerConfig)} == {each.partition("'")[0] for each in DECIDES} | DOES_NOT
    config = configure()
    assert {field for field in DOES_NOT if name(replace(config, **{field: "another"})) != name(config)} == set()


@pytest.mark.parametrize("flags", [flags for flags in DECIDES.values() if flags])
def test_what_decides_the_bytes_of_a_block_decides_the_name(flags):
    assert name(configure(*flags)) != name(configure())


@pytest.mark.parametrize("variable", ["FLAGS_use_mkldnn", "MKL_CBWR", "DNNL_MAX_CPU_ISA"])
def test_a_variable_of_the_math_libraries_decides_the_name(monkeypatch, variable):
    before = name(configure())
    monkeypatch.setenv(variable, "another")
    assert name(configure()) != before
