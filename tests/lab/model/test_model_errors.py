"""Model directories with missing or mismatched files: one clear line each."""

import json
import os

import pytest

from fastdeploy_kvcache_v1.errors import ModelError
from fastdeploy_kvcache_v1.lab.model import load_model_config
from fastdeploy_kvcache_v1.lab.model.llama import Llama
from fastdeploy_kvcache_v1.lab.server.text import load_tokenizer

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


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
CONFIGS = [
    # what config.json says, the refusal
    ({"architectures": ["MistralForCausalLM"]}, "unsupported architecture", "LlamaForCausalLM"),
    ({"architectures": None}, "unsupported architecture"),
    ({"hidden_size": None}, "missing required field `hidden_size`"),
    ({"hidden_size": "24"}, "Expected `int`, got `str` - at `$.hidden_size`"),
    ({"num_hidden_layers": 0}, "Expected `int` >= 1 - at `$.num_hidden_layers`"),
    ({"max_position_embeddings": 2**31}, "Expected `int` <= 2147483647 - at `$.max_position_embeddings`"),
    ({"rope_theta": 10**400}, " - at `$.rope_theta`"),
    ({"rms_norm_eps": 0}, "Expected `float` > 0.0 - at `$.rms_norm_eps`"),
    ({"rms_norm_eps": float("nan")}, "JSON is malformed"),
    ({"tie_word_embeddings": "yes"}, "Expected `bool`, got `str` - at `$.tie_word_embeddings`"),
    ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
    ({"head_dim": 5}, "head_dim must be even"),
    ({"hidden_act": "gelu"}, "unsupported hidden_act 'gelu'"),
    ({"mlp_bias": True}, "mlp_bias is not supported"),
    ({"attention_bias": True}, "attention_bias is not supported"),
    ({"use_sliding_window": True}, "use_sliding_window is not supported"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
    ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "unsupported rope type 'yarn'", "llama3"),
    ({"rope_parameters": {"type": "linear"}}, "unsupported rope type 'linear'"),
    ({"rope_scaling": LLAMA3}, "rope type llama3 needs factor"),
    ({"rope_scaling": LLAMA3 | {"low_freq_factor": 4, "original_max_position_embeddings": 64}}, "needs factor"),
    ({"rope_scaling": "linear"}, "got `str` - at `$.rope_scaling`"),
    ({"partial_rotary_factor": 0.5}, "partial rotary"),
    ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial rotary"),
    ({"vocab_size": 100}, "tokenizer.json has token ids up to", "only 100 tokens"),
    ({"eos_token_id": "end"}, "got `str` - at `$.eos_token_id`"),
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
    "no object": (file("config.json", b"[1, 2]"), "Expected `object`, got `array`"),
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


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda path: path.write_text('{"architectures": '), "cannot read {}: Input data was truncated"),
        (lambda path: path.write_text('{"a":' * 100_000), "cannot read {}: maximum recursion depth exceeded"),
        (os.mkfifo, "{.name} is missing or not a regular file"),  # nobody writes: it is never read to its end
    ],
)
def test_files_that_cannot_be_read(model, make, said, name):
    (model / name).unlink(missing_ok=True)
    make(model / name)
    assert_refused(model, said.format(model / name))
