"""Model directories with missing or mismatched files: one clear line each."""

import json
import os

import pytest

from fastdeploy_kvcache_v1.embedded.text import load_tokenizer
from fastdeploy_kvcache_v1.errors import ModelError
from fastdeploy_kvcache_v1.model import hf_json, load_model_config
from fastdeploy_kvcache_v1.model.llama import Llama

from .model_dirs import BASE, byte_level_tokenizer, random_tensors, write_model


def load(path):
    load_tokenizer(path)
    return Llama.load(path, load_model_config(path))


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


def test_the_untouched_directory_loads_and_one_that_is_missing_does_not(model, tmp_path):
    assert load(model).config.num_layers == 2
    with pytest.raises(ModelError, match="does not exist"):
        load_model_config(tmp_path / "nowhere")


CONFIGS = [
    # what config.json says, the refusal
    ({"architectures": ["MistralForCausalLM"]}, "unsupported architecture", "LlamaForCausalLM"),
    ({"architectures": None}, "unsupported architecture"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "24"}, "hidden_size must be an integer"),
    ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer from 1 to 2147483647, got 0"),
    ({"num_hidden_layers": 10**300}, "num_hidden_layers must be an integer from 1 to 2147483647, got 1000"),
    ({"max_position_embeddings": 2**31}, "max_position_embeddings must be an integer from 1 to 2147483647"),
    ({"rope_theta": 10**400}, "rope_theta must be a positive number, got 1000"),
    ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number, got 1000"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a positive number"),
    ({"tie_word_embeddings": "yes"}, "tie_word_embeddings must be true or false"),
    ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ({"head_dim": 5}, "head_dim must be even"),
    ({"hidden_act": "gelu"}, "unsupported hidden_act 'gelu'"),
    ({"mlp_bias": True}, "mlp_bias is not supported"),
    ({"use_sliding_window": True}, "use_sliding_window is not supported"),
    ({"quantization_config": {"bits": 4}}, "quantized weights"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "unsupported type 'yarn'", "llama3"),
    ({"rope_scaling": {"type": "linear"}}, "unsupported type 'linear'"),
    ({"rope_scaling": {"type": "llama3"}}, "low_freq_factor is missing"),
    ({"rope_scaling": "linear"}, "rope_scaling must be an object"),
    ({"partial_rotary_factor": 0.5}, "partial rotary"),
    ({"vocab_size": 100}, "tokenizer.json has token ids up to", "only 100 tokens"),
    ({"eos_token_id": "end"}, "eos_token_id must be"),
    ({"intermediate_size": 40}, "tensor model.layers.0.mlp.gate_proj.weight has shape [36, 24]", "asks for [40, 24]"),
]


@pytest.mark.parametrize("row", CONFIGS, ids=lambda row: str(row[0])[:60])
def test_config_values(model, row):
    change, *fragments = row
    (model / "config.json").write_text(json.dumps(BASE | change))
    assert_refused(model, *fragments)


def without(tensor):
    return {name: each for name, each in random_tensors(BASE).items() if name != tensor}


def weights(**changes):
    return lambda model: write_model(model, random_tensors(BASE) | changes, BASE)


def file(name, content):
    return lambda model: (model / name).write_bytes(content)


def missing(name):
    return lambda model: (model / name).unlink()


NORM = random_tensors(BASE)["model.norm.weight"].astype("int64")
DAMAGES = {
    # what is wrong: how it is made so, the refusal
    "no config": (missing("config.json"), "config.json is missing"),
    "no tokenizer": (missing("tokenizer.json"), "tokenizer.json is missing"),
    "no weights": (missing("model.safetensors"), "no *.safetensors file"),
    "no object": (file("config.json", b"[1, 2]"), "must hold a JSON object"),
    "a tensor is missing": (
        lambda model: write_model(model, without("model.layers.1.mlp.up_proj.weight"), BASE),
        "tensor model.layers.1.mlp.up_proj.weight is missing",
    ),
    "integers as weights": (weights(**{"model.norm.weight": NORM}), "tensor model.norm.weight has unsupported dtype"),
    "half a file": (file("model.safetensors", b"\x10" + bytes(20)), "model.safetensors"),
    "no safetensors": (file("model.safetensors", b"\xff" * 64), "cannot read", "model.safetensors"),
    "an empty file": (file("model.safetensors", b""), "cannot read", "model.safetensors"),
    "half a tokenizer": (file("tokenizer.json", b'{"a":'), "has no usable tokenizer"),
    "settings of no tokenizer": (file("tokenizer_config.json", b'{"a":' * 100_000), "has no usable tokenizer"),
    "a template that is no text": (file("chat_template.jinja", b"\xff\xfe"), "has no usable tokenizer"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_directories(model, damage):
    damages, *fragments = DAMAGES[damage]
    damages(model)
    assert_refused(model, *fragments)


JSON_FILES = ("config.json", "generation_config.json")
UNREADABLE = [
    # how a file becomes so, what is said, which files
    (lambda path: path.write_text('{"architectures": '), "", JSON_FILES),
    (lambda path: path.write_text('{"a":' * 100_000), ": its JSON is nested too deeply", JSON_FILES),
    (os.mkfifo, ": it is not a regular file", JSON_FILES),  # nobody writes: it is never read to its end
    (os.mkdir, ": it is not a regular file", JSON_FILES),
    (lambda path: path.symlink_to("/dev/null"), ": it is not a regular file", JSON_FILES),
    (
        lambda path: os.truncate(os.open(path, os.O_CREAT | os.O_WRONLY), 1 << 40),
        ": it is larger than 2 MiB",
        JSON_FILES,
    ),
]


@pytest.mark.parametrize(
    ("make", "said", "name"), [(make, said, name) for make, said, names in UNREADABLE for name in names]
)
def test_files_that_cannot_be_read(model, monkeypatch, make, said, name):
    monkeypatch.setattr(hf_json, "MAX_FILE_MIB", 2)
    (model / name).unlink(missing_ok=True)
    make(model / name)
    assert_refused(model, f"cannot read {model / name}{said}")
