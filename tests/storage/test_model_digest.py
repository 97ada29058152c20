"""Whatever decides what a model directory computes decides the name of its stored blocks."""

import json

import pytest

from fastdeploy_kvcache_v1.errors import ModelError
from fastdeploy_kvcache_v1.storage import model_digest as model_digest_module
from fastdeploy_kvcache_v1.storage.model_digest import model_digest, numeric_variables, paddle_version, processor


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    for name in ("a.safetensors", "b.safetensors", "c.bin"):
        (tmp_path / name).write_bytes(name.encode() * 100)
    index(tmp_path, {"x": "a.safetensors", "y": "b.safetensors"})
    return tmp_path


def index(directory, weight_map):
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_weights_settings_and_index_decide_the_name(directory):
    names = {model_digest(directory)}
    assert names == {model_digest(directory)}
    for change in (
        lambda: (directory / "config.json").write_text('{"rope_theta": 1}'),
        lambda: (directory / "b.safetensors").write_bytes(b"b.safetensors" * 99 + b"b.safetensorx"),
        lambda: index(directory, {"x": "b.safetensors", "y": "a.safetensors"}),
        lambda: index(directory, {"x": "c.bin", "y": "a.safetensors"}),
        lambda: (directory / "c.bin").write_bytes(b"other weights"),
        lambda: (directory / "model_state.pdparams").write_bytes(b"weights"),
    ):
        change()
        names.add(model_digest(directory))
    assert len(names) == 7


def test_a_model_that_cannot_be_read_is_one_line(directory):
    index(directory, {"x": "gone.safetensors"})
    with pytest.raises(ModelError, match="cannot be read"):
        model_digest(directory)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 1}'])
def test_an_index_that_no_server_can_use_is_a_file_like_others(directory, content):
    (directory / "model.safetensors.index.json").write_text(content)
    assert model_digest(directory) == model_digest(directory)


def test_the_parts_of_each_rank_decide_it_wherever_they_are(tmp_path):
    names = set()
    for weights in (b"one", b"two"):
        for rank in range(2):
            (tmp_path / f"rank{rank}").mkdir(exist_ok=True)
            (tmp_path / f"rank{rank}" / "model_state.pdparams").write_bytes(weights)
            names.add(model_digest(tmp_path))
    assert len(names) == 4
    (tmp_path / "rank1" / "config.json").write_text("{}")
    assert model_digest(tmp_path) not in names


@pytest.mark.parametrize("exists", [True, False])
def test_without_weights_there_is_no_name(tmp_path, exists):
    directory = tmp_path / "model"
    if exists:
        directory.mkdir()
        (directory / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="holds no"):
        model_digest(directory)


def test_variables_that_may_decide_numbers_are_named_in_order(monkeypatch):
    for name in numeric_variables():
        monkeypatch.delenv(name.partition("=")[0])
    for name in ("FLAGS_b", "FLAGS_a", "NVIDIA_TF32_OVERRIDE", "OURS_1", "ALONE", "OTHER"):
        monkeypatch.setenv(name, "1")
    ours = numeric_variables(("OURS_",), more=["ALONE"], without=["FLAGS_b"])
    assert ours == ["ALONE=1", "FLAGS_a=1", "NVIDIA_TF32_OVERRIDE=1", "OURS_1=1"]
    assert numeric_variables() == ["FLAGS_a=1", "FLAGS_b=1", "NVIDIA_TF32_OVERRIDE=1"]


def test_processors_and_paddles_are_told_apart(monkeypatch):
    assert paddle_version().startswith("paddlepaddle")
    for flags, unit in (("avx2 sse", "avx2"), ("avx512f avx2", "avx512f"), ("", "unknown")):
        monkeypatch.setattr(model_digest_module.Path, "read_text", lambda self, flags=flags: flags)
        assert processor().split()[-1] == unit
