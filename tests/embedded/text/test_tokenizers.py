import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from fastdeploy_kvcache_v1.embedded.text.byte_tokenizer import ByteTokenizer
from fastdeploy_kvcache_v1.embedded.text.hf_tokenizer import MAX_HELD_BACK
from fastdeploy_kvcache_v1.embedded.text.load_tokenizer import load_tokenizer
from fastdeploy_kvcache_v1.errors import ConfigError, ModelError
from fastdeploy_kvcache_v1.model.config import load_model_config
from tests.model.model_dirs import byte_fallback_tokenizer, byte_level_tokenizer

CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "{%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + message.role) }}{% endif %}"
    "{{ bos_token + message.role + ':' + message.content | trim + eos_token }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}assistant:{% endif %}"
)
TEXTS = ["", "plain", "hello a b", "é你好😀", "half \ud83d pair", "  two  spaces ", "\x00\n<|eos|>"]


def save(path, tokenizer, **files):
    tokenizer.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return {
        "bytes": load_tokenizer(None),
        "byte-level": load_tokenizer(save(tmp_path_factory.mktemp("level"), byte_level_tokenizer())),
        "byte-fallback": load_tokenizer(save(tmp_path_factory.mktemp("fallback"), byte_fallback_tokenizer())),
    }


def stream(tokenizer, token_ids):
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(token) for token in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("kind", ["bytes", "byte-level", "byte-fallback"])
@given(data=st.data())
def test_streamed_pieces_join_to_the_full_text(tokenizers, kind, data):
    """Any token ids, also those that are no valid UTF-8, special, or unknown."""
    tokenizer = tokenizers[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@pytest.mark.parametrize("kind", ["bytes", "byte-level"])
@given(text=st.text(max_size=30))
def test_no_half_character_is_ever_shown(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode(text)
    shown = ""
    for piece in stream(tokenizer, token_ids):
        shown += piece
        assert text.startswith(shown)
    assert shown == text == tokenizer.decode(token_ids)


def test_bytes_that_never_become_characters_are_not_held_back_for_ever(tokenizers):
    tokenizer = tokenizers["byte-level"]
    token = byte_level_tokenizer().get_vocab()["ÿ"]  # the byte 0xFF
    shown = 0
    detokenizer = tokenizer.detokenizer()
    for pushed in range(1, 500):
        shown += len(detokenizer.push(token))
        assert pushed - shown <= MAX_HELD_BACK, "what is held back is decoded again with every token"
    assert shown + len(detokenizer.flush()) == 499


def test_byte_tokenizer_fits_the_random_model():
    tokenizer = load_tokenizer(None)
    assert tokenizer.vocab_size == load_model_config(None).vocab_size
    assert tokenizer.encode("a<|eos|>")[:2] == [ByteTokenizer.BOS, ord("a")]
    assert max(tokenizer.encode("a<|eos|>")[1:]) < 256
    assert tokenizer.decode([ByteTokenizer.BOS, 0xFF, 0x41, ByteTokenizer.EOS, 5000]) == "\ufffdA"


def test_byte_tokenizer_chat():
    t = ByteTokenizer()
    ids = t.apply_chat_template([{"role": "system", "content": "s"}, {"role": "user", "content": "u"}])
    assert ids == [t.BOS, t.SYSTEM, ord("s"), t.END_OF_TURN, t.USER, ord("u"), t.END_OF_TURN, t.ASSISTANT]
    # The next turn's prompt begins with the last one's: that is what a prefix cache lives on.
    more = t.apply_chat_template(
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"},
            {"role": "user", "content": None},
        ]
    )
    assert more[: len(ids)] == ids
    with pytest.raises(ConfigError, match="unknown message role 'robot'"):
        t.apply_chat_template([{"role": "robot", "content": "x"}])
    with pytest.raises(ConfigError, match="must be text, got dict"):
        t.apply_chat_template([{"role": "user", "content": [{"type": "text"}]}])


def test_raw_prompts_get_the_special_tokens_and_chats_do_not(tmp_path):
    rust = byte_level_tokenizer()
    rust.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    settings = {"chat_template": CHAT_TEMPLATE, "bos_token": {"content": "<|bos|>"}, "eos_token": "<|eos|>"}
    tokenizer = load_tokenizer(save(tmp_path, rust, tokenizer_config=settings))
    assert tokenizer.encode("he")[0] == 0
    ids = tokenizer.apply_chat_template([{"role": "user", "content": " he "}])
    assert (ids.count(0), ids.count(1), ids[0]) == (1, 1, 0)
    assert rust.decode(ids, skip_special_tokens=False) == "<|bos|>user:he<|eos|>assistant:"


def test_a_template_may_refuse_messages(tmp_path):
    settings = {"chat_template": CHAT_TEMPLATE, "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    tokenizer = load_tokenizer(save(tmp_path, byte_level_tokenizer(), tokenizer_config=settings))
    with pytest.raises(ConfigError, match="rejects these messages: no robot"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])
    with pytest.raises(ConfigError, match="rejects these messages"):
        tokenizer.apply_chat_template([{"content": "no role"}])


def test_a_template_sees_the_variables_of_a_request(tmp_path):
    template = "{{ enable_thinking | default('unset') }} {{ add_generation_prompt }} {{ messages | length }}"
    tokenizer = load_tokenizer(save(tmp_path, byte_level_tokenizer(), tokenizer_config={"chat_template": template}))
    for variables, text in (
        (None, "unset True 1"),
        ({"enable_thinking": False}, "False True 1"),
        ({"add_generation_prompt": False, "messages": []}, "unset False 1"),
    ):
        assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user"}], variables)) == text


def test_templates_run_in_a_sandbox(tmp_path):
    settings = {"chat_template": "{{ messages.__class__.__mro__ }}{{ messages.append(1) }}"}
    tokenizer = load_tokenizer(save(tmp_path, byte_level_tokenizer(), tokenizer_config=settings))
    with pytest.raises(ConfigError, match="rejects these messages"):
        tokenizer.apply_chat_template([])


def test_template_sources(tmp_path):
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "{{ messages | tojson }}é"}]
    path = save(tmp_path, byte_level_tokenizer(), tokenizer_config={"chat_template": named})
    assert load_tokenizer(path).decode(load_tokenizer(path).apply_chat_template([{"a": "é"}])) == '[{"a": "é"}]é'
    (path / "chat_template.jinja").write_text(
        "{{ strftime_now('%Y') | length }}{% for i in [1, 2] %}{% break %}{% endfor %}"
    )
    assert load_tokenizer(path).decode(load_tokenizer(path).apply_chat_template([])) == "4"


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({}, ConfigError, "no chat template"),
        ({"chat_template": "\n{% if %}"}, ModelError, "^the chat template does not compile: line 2: .*$"),
    ],
)
def test_without_a_template_chats_are_refused_in_one_line(tmp_path, settings, error, message):
    tokenizer = load_tokenizer(save(tmp_path, byte_level_tokenizer(), tokenizer_config=settings))
    with pytest.raises(error, match=message):
        tokenizer.apply_chat_template([])


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 5}}, {5}),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({"generation_config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "<|eos|>"}}, {1, 7}),
        ({"tokenizer_config": {"eos_token": {"content": "<|eos|>"}}}, {1}),
    ],
)
def test_end_of_sequence_ids(tmp_path, files, expected):
    assert load_tokenizer(save(tmp_path, byte_level_tokenizer(), **files)).eos_token_ids == expected
