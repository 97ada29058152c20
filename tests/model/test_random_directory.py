"""The random model's directory is one that transformers, and so FastDeploy, reads like any other."""

import pytest
from transformers import AutoConfig, AutoTokenizer

from fastdeploy_kvcache_v1.model.random_directory import RANDOM_DIRECTORY, read_seed, write_random_directory

BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, END, IMAGE = range(256, 264)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(RANDOM_DIRECTORY)


@pytest.mark.parametrize("text", ["", "hello  world\n", " 你好, wörld \U0001f680", bytes(range(128)).decode()])
def test_a_token_is_a_byte(tokenizer, text):
    assert tokenizer.encode(text) == [BOS, *text.encode()]
    assert tokenizer.decode([*text.encode(), EOS], skip_special_tokens=True) == text


def test_bytes_that_are_no_text_are_replaced(tokenizer):
    assert tokenizer.decode([104, 0xE4, 0xBD]) == "h\ufffd"


def test_special_tokens_lie_above_the_bytes(tokenizer):
    config = AutoConfig.from_pretrained(RANDOM_DIRECTORY)
    assert (len(tokenizer), config.vocab_size) == (IMAGE + 1, IMAGE + 1)
    assert (tokenizer.eos_token_id, tokenizer.image_token_id, config.eos_token_id) == (EOS, IMAGE, EOS)


def test_the_chat_template_names_each_turn_and_places_images(tokenizer):
    messages = [
        {"role": "developer", "content": "be  good\n"},
        {"role": "user", "content": ["<", {"type": "image", "num_tokens": 3}, {"type": "text", "text": "> ?"}]},
        {"role": "assistant", "content": None},
        {"role": "tool", "content": " 7 "},
    ]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert ids == [
        *(BOS, SYSTEM, *b"be  good\n", END, USER, *b"<", IMAGE, IMAGE, IMAGE, *b"> ?", END),
        *(ASSISTANT, END, TOOL, *b" 7 ", END, ASSISTANT),
    ]
    with pytest.raises(Exception, match="unknown message role 'clown': choose one of system"):
        tokenizer.apply_chat_template([{"role": "clown", "content": ""}])


def test_weights_are_told_apart_by_their_seed(tmp_path):
    one, two = (write_random_directory(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    assert (one / "tokenizer.json").read_bytes() == (RANDOM_DIRECTORY / "tokenizer.json").read_bytes()
    assert (one / "model.safetensors").read_bytes() != (two / "model.safetensors").read_bytes()
    assert [read_seed(path) for path in (one, two)] == [1, 2]
