"""Model directories with missing or mismatched files: one clear line each."""

import json
import os

import pytest

from fastdeploy_kvcache_v1.embedded.text.load_tokenizer import load_tokenizer
from fastdeploy_kvcache_v1.errors import ModelError
from fastdeploy_kvcache_v1.model import hf_json, load_model_config
from fastdeploy_kvcache_v1.model.decoder import Decoder

from .model_dirs import BASE, byte_level_tokenizer, random_tensors, write_model


def load(path):
    load_tokenizer(path).compile_template()
    return Decoder.load(path, load_model_config(path))


@pytest.fixture
def model(tmp_path):
    path = write_model(tmp_path / "model", random_tensors(BASE), BASE)
    byte_level_tokenizer().save(str(path / "tokenizer.json"))
    return path


def assert_refused(path, *fragments):
    with pytest.raises(ModelError) as caught:
        load(path)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 500
    for fragment in fragments:
        assert fragment in message


def test_the_untouched_directory_loads(model):
    assert load(model).config.num_layers == 2


def test_missing_directory(tmp_path):
    with pytest.raises(ModelError, match="does not exist"):
        load_model_config(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_missing_file(model, name):
    (model / name).unlink()
    assert_refused(model, f"{name} is missing")


@pytest.mark.parametrize(
    ("change", "fragments"),
    [
        ({"architectures": ["MistralForCausalLM"]}, ("unsupported architecture", "LlamaForCausalLM")),
        ({"architectures": None}, ("unsupported architecture",)),
        ({"hidden_size": None}, ("hidden_size is missing",)),
        ({"hidden_size": "24"}, ("hidden_size must be an integer",)),
        ({"num_hidden_layers": 0}, ("num_hidden_layers must be an integer from 1 to 2147483647, got 0",)),
        ({"num_hidden_layers": 10**300}, ("num_hidden_layers must be an integer from 1 to 2147483647, got 1000",)),
        ({"max_position_embeddings": 2**31}, ("max_position_embeddings must be an integer from 1 to 2147483647",)),
        ({"rope_theta": 10**400}, ("rope_theta must be a positive number, got 1000",)),
        ({"rms_norm_eps": 10**400}, ("rms_norm_eps must be a positive number, got 1000",)),
        ({"rms_norm_eps": float("nan")}, ("rms_norm_eps must be a positive number",)),
        ({"tie_word_embeddings": "yes"}, ("tie_word_embeddings must be true or false",)),
        ({"num_key_value_heads": 3}, ("4 attention heads cannot share 3",)),
        ({"head_dim": 5}, ("head_dim must be even",)),
        ({"hidden_act": "gelu"}, ("unsupported hidden_act 'gelu'",)),
        ({"mlp_bias": True}, ("mlp_bias is not supported",)),
        ({"use_sliding_window": True}, ("use_sliding_window is not supported",)),
        ({"quantization_config": {"bits": 4}}, ("quantized weights",)),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, ("unsupported type 'yarn'", "llama3")),
        ({"rope_scaling": {"type": "linear"}}, ("factor is missing",)),
        ({"rope_scaling": "linear"}, ("rope_scaling must be an object",)),
        ({"partial_rotary_factor": 0.5}, ("partial rotary",)),
        ({"vocab_size": 100}, ("tokenizer.json has token ids up to", "only 100 tokens")),
        ({"eos_token_id": "end"}, ("eos_token_id must be",)),
    ],
)
def test_config_values(model, change, fragments):
    (model / "config.json").write_text(json.dumps(BASE | change))
    assert_refused(model, *fragments)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_broken_json(model, name):
    (model / name).write_text('{"architectures": ')
    assert_refused(model, f"cannot read {model / name}")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("opening", ["[", '{"a":'])
def test_json_nested_without_end(model, name, opening):
    (model / name).write_text(opening * 100_000)
    assert_refused(model, f"cannot read {model / name}: its JSON is nested too deeply")


EVERY_SMALL_FILE = (
    "config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)


@pytest.mark.parametrize("name", EVERY_SMALL_FILE)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda file: file.symlink_to("/dev/null")])
def test_files_that_are_no_files(model, name, make):
    """A pipe that nobody writes is never read to its end, nor is /dev/zero."""
    (model / name).unlink(missing_ok=True)
    make(model / name)
    assert_refused(model, f"cannot read {model / name}: it is not a regular file")


@pytest.mark.parametrize("name", EVERY_SMALL_FILE)
def test_files_larger_than_memory(model, name, monkeypatch):
    """Sparse ones take no space on the disk."""
    monkeypatch.setattr(hf_json, "MAX_FILE_MIB", 2)
    with (model / name).open("ab") as file:
        file.truncate(1 << 40)
    assert_refused(model, f"cannot read {model / name}: it is larger than 2 MiB")


def test_json_that_is_no_object(model):
    (model / "config.json").write_text("[1, 2]")
    assert_refused(model, "must hold a JSON object")


def test_no_weights(model):
    (model / "model.safetensors").unlink()
    assert_refused(model, "no *.safetensors file")


def test_missing_tensor(tmp_path, model):
    tensors = random_tensors(BASE)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    write_model(model, tensors, BASE)
    assert_refused(model, "tensor model.layers.1.mlp.up_proj.weight is missing")


def test_wrong_shape(model):
    (model / "config.json").write_text(json.dumps(BASE | {"intermediate_size": 40}))
    assert_refused(model, "tensor model.layers.0.mlp.gate_proj.weight has shape [36, 24]", "asks for [40, 24]")


def test_wrong_dtype(model):
    tensors = random_tensors(BASE)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype("int64")
    write_model(model, tensors, BASE)
    assert_refused(model, "tensor model.norm.weight has unsupported dtype")


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"\xff" * 64, lambda data: b""])
def test_broken_safetensors(model, damage):
    file = model / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    assert_refused(model, f"cannot read {file}")


def test_missing_shard(model):
    (model / "model.safetensors").unlink()
    write_model(model, random_tensors(BASE), BASE, shards=3)
    (model / "model-00002-of-00003.safetensors").unlink()
    assert_refused(model, "weight file model-00002-of-00003.safetensors is missing")


def test_index_that_lies(model):
    index = {"weight_map": dict.fromkeys(random_tensors(BASE), "model.safetensors") | {"lm_head.weight": 7}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(model, "weight_map must name the file")


def test_index_naming_a_tensor_that_its_file_lacks(model):
    tensors = random_tensors(BASE)
    names = list(tensors)
    del tensors["lm_head.weight"]
    write_model(model, tensors, BASE)
    index = {"weight_map": dict.fromkeys(names, "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_refused(model, "cannot read tensor lm_head.weight")


def test_chat_template_file_that_is_not_text(model):
    (model / "chat_template.jinja").write_bytes(b"\xff\xfe")
    assert_refused(model, "cannot read", "chat_template.jinja")


@pytest.mark.parametrize("template", ["{% if %}", ["not a template"], 7])
def test_broken_chat_template(model, template):
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    if isinstance(template, list):
        load(model)  # a list without a default template is no template
    else:
        assert_refused(model, "chat")
