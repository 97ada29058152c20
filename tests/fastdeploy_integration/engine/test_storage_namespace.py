"""Which stored blocks a FastDeploy server may use."""

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import storage_namespace
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for


@pytest.fixture(autouse=True)
def active(monkeypatch):
    monkeypatch.setattr(overlay, "active", lambda: SimpleNamespace(table=table_for("2.6")))


@pytest.fixture
def config(tmp_path):
    for name in ("main", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_text(name)
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(tmp_path / "main"),
            quantization=None,
            quantization_config=None,
            num_hidden_layers=2,
            num_key_value_heads=2,
            head_dim=16,
            dtype="bfloat16",
        ),
        cache_config=SimpleNamespace(block_size=64),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        speculative_config=SimpleNamespace(method=None, model=str(tmp_path / "draft")),
        quant_config=None,
        load_config=SimpleNamespace(load_choices="default_v1", dynamic_load_weight=False),
    )


def name(config, attention_backend="APPEND_ATTN"):
    return storage_namespace.storage_namespace(config, attention_backend).digest


def test_what_decides_the_bytes_of_a_block_decides_the_name(config, tmp_path):
    names = [name(config), name(config, "FLASH_ATTN")]
    config.model_config.dtype = "float16"
    names.append(name(config))
    config.parallel_config.tensor_parallel_size = 2
    names.append(name(config))
    config.cache_config.block_size = 32
    names.append(name(config))
    config.model_config.quantization = {"quantization": "wint4"}
    names.append(name(config))
    (tmp_path / "main" / "model.safetensors").write_text("tuned")
    names.append(name(config))
    assert len(set(names)) == len(names)
    assert name(config) == names[-1]


def test_the_weights_of_a_draft_model_whose_layer_is_cached_count(config, tmp_path):
    before = name(config)
    (tmp_path / "draft" / "model.safetensors").write_text("tuned")
    assert name(config) == before, "it is not used"
    config.speculative_config.method = "mtp"
    tuned = name(config)
    (tmp_path / "draft" / "model.safetensors").write_text("tuned again")
    assert len({before, tuned, name(config)}) == 3


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
