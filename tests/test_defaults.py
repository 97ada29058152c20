"""Defaults and constants stand in one place: a change there is a change everywhere."""

import argparse
import ast
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.config import DEFAULT_PORT, GIB, KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.flags import add_flags
from fastdeploy_kvcache_v1.lab import replay
from fastdeploy_kvcache_v1.lab.model.config import load_model_config
from fastdeploy_kvcache_v1.lab.server.settings import FLAGS, server_config
from fastdeploy_kvcache_v1.switch import SWITCH, is_enabled

PACKAGE = Path(__file__).parents[1] / "fastdeploy_kvcache_v1"
SHARED = ("block_size", "write_policy", "write_through_threshold", "eviction_policy")
CHOSEN = [
    ((None, None, False), WritePolicy.AUTO),
    ((None, None, True), WritePolicy.WRITE_THROUGH),
    ((None, 2, False), WritePolicy.WRITE_THROUGH_SELECTIVE),
    ((None, 3, True), WritePolicy.WRITE_THROUGH_SELECTIVE),
    (("write_back", 3, True), WritePolicy.WRITE_BACK),
    (("auto", None, True), WritePolicy.AUTO),
]
"""What is given, whether there is storage, and what follows."""


def served(*words):
    parser = argparse.ArgumentParser()
    add_flags(parser, FLAGS)
    return server_config(parser.parse_args(words), load_model_config(None), free_bytes=8 * GIB)


def test_replay_has_the_defaults_of_the_config():
    parser = argparse.ArgumentParser()
    replay.add_arguments(parser)
    config = replay.command.options_from(parser.parse_args(["trace"])).config
    assert [getattr(config, name) for name in SHARED] == [getattr(KVCacheConfig, name) for name in SHARED]


@pytest.mark.parametrize(("given", "policy"), CHOSEN)
def test_default_write_policy_follows_from_the_given_flags(given, policy):
    name, threshold, stores = given
    assert WritePolicy.chosen(name, threshold, stores=stores) is policy
    flags = ["--write-policy", name] if name else []
    flags += ["--write-through-threshold", str(threshold)] if threshold else []
    flags += ["--kvcache-storage-backend", "file", "--kvcache-storage-dir", "x"] if stores else []
    assert served(*flags).cache.write_policy is policy


def test_a_store_of_device_blocks_changes_nothing():
    assert served("--kvcache-storage-backend", "attention_store").cache.write_policy is WritePolicy.AUTO


def test_the_embedded_server_has_the_defaults_of_the_config():
    config = served()
    assert [getattr(config.cache, name) for name in SHARED] == [getattr(KVCacheConfig, name) for name in SHARED]
    assert config.port == DEFAULT_PORT


def constants_of(path):
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


@pytest.mark.parametrize(("constant", "module"), [(SWITCH, "switch.py"), (DEFAULT_PORT, "config.py")])
def test_a_constant_stands_in_one_module(constant, module):
    found = [path for path in PACKAGE.rglob("*.py") if constant in constants_of(path)]
    assert found == [PACKAGE / module]


@pytest.mark.parametrize(
    ("value", "unset", "enabled"), [("1", "0", True), ("0", "1", False), ("", "1", True), ("", "0", False)]
)
def test_the_switch(monkeypatch, value, unset, enabled):
    monkeypatch.setenv(SWITCH, value)
    assert is_enabled(unset=unset) is enabled
