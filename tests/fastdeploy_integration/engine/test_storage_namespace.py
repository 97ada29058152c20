"""Which stored blocks a FastDeploy server may use."""

import os
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import storage_namespace
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for
from tests.fastdeploy_integration.fd_configs import fd_config


@pytest.fixture(autouse=True)
def active(monkeypatch):
    for variable in [each for each in os.environ if each.startswith(("FD_", "FLAGS_"))]:
        monkeypatch.delenv(variable)
    monkeypatch.setattr(overlay, "active", lambda: SimpleNamespace(table=table_for("2.6")))


@pytest.fixture
def config(tmp_path):
    for name in ("main", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    made = fd_config(model=str(tmp_path / "main"), num_key_value_heads=2, head_dim=16, block_size=64)
    made.speculative_config.model = str(tmp_path / "draft")
    return made


def name(config, attention_backend="APPEND_ATTN"):
    return storage_namespace.storage_namespace(config, attention_backend).digest


@pytest.mark.parametrize(
    # where: a part of the configuration, or None for an environment variable
    ("where", "setting", "value"),
    [
        ("model_config", "dtype", "float16"),
        ("model_config", "quantization", {"quantization": "wint4"}),
        ("model_config", "num_hidden_layers", 3),
        ("parallel_config", "tensor_parallel_size", 2),
        ("cache_config", "block_size", 32),
        # what nobody has listed
        ("model_config", "moe_gate_fp32", True),
        ("speculative_config", "num_speculative_tokens", 5),
        ("load_config", "of_a_later_release", ["x", {"y": {1, 2}}]),
        (None, "FD_MOE_BACKEND", "triton"),
        (None, "FLAGS_flash_attn_version", "3"),
        (None, "FD_OF_A_LATER_RELEASE", ""),
    ],
)
def test_what_may_decide_the_bytes_of_a_block_decides_the_name(config, monkeypatch, where, setting, value):
    before = name(config)
    if where is None:
        monkeypatch.setenv(setting, value)
    else:
        setattr(getattr(config, where), setting, value)
    changed = name(config)
    assert len({before, changed, name(config, "FLASH_ATTN")}) == 3
    assert name(config) == changed


def test_variables_of_the_release_count_whatever_they_are_called(config, monkeypatch):
    names = [storage_namespace.settings_digest(config, ["CUDA_VISIBLE_DEVICES", "ROUND_UP"])]
    for variable in ("CUDA_VISIBLE_DEVICES", "ROUND_UP", "ROUND_DOWN"):
        monkeypatch.setenv(variable, "1")
        names.append(storage_namespace.settings_digest(config, ["CUDA_VISIBLE_DEVICES", "ROUND_UP"]))
    assert names[0] == names[1] != names[2] == names[3]
    assert {len(each) for each in names} == {32}


def test_a_configuration_that_holds_itself_has_a_name(config):
    before = name(config)
    config.load_config.owner = config
    assert name(config) != before


def test_what_cannot_be_looked_into_is_found_by_no_other_process_which_is_said(config, caplog):
    """Its text has its address: two objects at once are two names."""
    config.load_config.token = "a secret"
    names = [name(config)]
    assert not caplog.records
    kept = [object(), object()]
    for config.load_config.opaque in kept:
        names.append(name(config))
    assert len(set(names)) == 3
    message, _ = caplog.messages
    assert message.startswith("no other process finds stored blocks")
    assert "<object object at 0x" in message
    assert "secret" not in message


def test_a_secret_is_not_in_the_manifest(config, monkeypatch):
    monkeypatch.setenv("FD_SECRET_OF_A_LATER_RELEASE", "rumpelstilzchen")
    assert "rumpelstilzchen" not in storage_namespace.storage_namespace(config, "APPEND_ATTN").manifest()


def test_weights_count_and_those_of_a_draft_model_whose_layer_is_cached(config, tmp_path):
    for file, method, counts in (("main", None, True), ("draft", None, False), ("draft", "mtp", True)):
        config.speculative_config.method = method
        before = name(config)
        with (tmp_path / file / "model.safetensors").open("a") as weights:
            weights.write("tuned")
        assert (name(config) != before) == counts


def test_the_model_of_the_gpu_counts(config, tmp_path, monkeypatch):
    names = [name(config)]
    monkeypatch.setattr(storage_namespace, "GPU_FILES", tmp_path / "gpus")
    for gpu, model in (("0", "NVIDIA H100"), ("1", "NVIDIA A100")):
        (tmp_path / "gpus" / gpu).mkdir(parents=True)
        (tmp_path / "gpus" / gpu / "information").write_text(f"Model: \t\t {model}\nIRQ: 3\n")
        names.append(name(config))
    assert len(set(names)) == 3


@pytest.mark.parametrize(
    ("load_choices", "dynamic", "expected"),
    [
        ("default_v1", False, True),
        ("LoadChoices.DUMMY", False, False),
        ("dummy", False, False),
        ("default", True, False),
    ],
)
def test_whether_the_weights_are_those_of_the_directory(config, load_choices, dynamic, expected):
    config.load_config.load_choices, config.load_config.dynamic_load_weight = load_choices, dynamic
    assert storage_namespace.has_weights_of_directory(config) is expected
