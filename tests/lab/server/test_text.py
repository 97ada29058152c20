"""Tokenizers of model directories: their ids, their templates, and streamed text that adds up."""

import json
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import processors

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.lab.model.config import load_model_config
from fastdeploy_kvcache_v1.lab.server.text import load_tokenizer
from tests.lab.model.model_dirs import byte_fallback_tokenizer, byte_level_tokenizer
from tests.lab.server.random_text import BOS, EOS, byte_stream

CHAT_TEMPLATE = (
    "{%- for message in messages %}\n"
    "{%- if message.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + message.role) }}{% endif %}"
    "{{ bos_token + message.role + ':' + message.content | trim + eos_token }}\n"
    "{%- endfor %}\n"
    "{%- if add_generation_prompt %}assistant:{% endif %}"
)


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
    text = tokenizer.stream()
    return [*(text.push(token) for token in token_ids), text.flush()]


@pytest.mark.parametrize("kind", ["bytes", "byte-level"])
@given(data=st.data())
def test_streamed_pieces_join_to_the_full_text(tokenizers, kind, data):
    """Any token ids, also those that are no valid UTF-8, special, or unknown."""
    tokenizer = tokenizers[kind]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    assert "".join(stream(tokenizer, token_ids)) == tokenizer.decode(token_ids)


@given(data=st.data())
def test_bytes_that_are_no_text_stop_no_stream(tokenizers, data):
    """With byte fallback a run of bytes is judged as a whole, so what was certain may change: the decoder refuses."""
    tokenizer = tokenizers["byte-fallback"]
    token_ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=40))
    *_, last, flushed = stream(tokenizer, [*token_ids, *tokenizer.encode("b")])
    assert (last[-1:], flushed) == ("b", "")


@pytest.mark.parametrize("kind", ["bytes", "byte-level", "byte-fallback"])
@given(text=st.text(max_size=30))
def test_no_half_character_is_ever_shown(tokenizers, kind, text):
    tokenizer = tokenizers[kind]
    token_ids = tokenizer.encode(text)
    whole, shown = tokenizer.decode(token_ids), ""
    for piece in stream(tokenizer, token_ids):
        shown += piece
        assert whole.startswith(shown)
    assert shown == whole
    assert whole == text or kind == "byte-fallback"


def test_the_byte_tokenizer_fits_the_random_model():
    tokenizer = load_tokenizer(None)
    assert tokenizer.vocab_size == load_model_config(None).vocab_size
    assert tokenizer.encode("ab") == [BOS, *b"ab"]
    assert tokenizer.decode([BOS, 0xFF, 0x41, EOS, 5000]) == "\ufffdA"
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant", "developer", "tool")]
    # The next turn's prompt begins with the last one's: that is what a prefix cache lives on.
    first = tokenizer.apply_chat_template(turns[:2])
    assert tokenizer.apply_chat_template(turns)[: len(first)] == first
    with pytest.raises(ConfigError, match="unknown message role 'robot'"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])


def test_raw_prompts_get_the_special_tokens_and_chats_do_not(tmp_path):
    rust = byte_level_tokenizer()
    rust.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    settings = {"chat_template": CHAT_TEMPLATE, "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    tokenizer = load_tokenizer(save(tmp_path, rust, tokenizer_config=settings))
    assert tokenizer.encode("he")[0] == 0
    ids = tokenizer.apply_chat_template([{"role": "user", "content": " he "}])
    assert (ids.count(0), ids.count(1), ids[0]) == (1, 1, 0)
    assert rust.decode(ids, skip_special_tokens=False) == "<|bos|>user:he<|eos|>assistant:"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (CHAT_TEMPLATE, "the model's chat template rejects these messages: no robot"),
        ("{{ messages.__class__.__mro__ }}", "the model's chat template rejects these messages: "),
        ("{% if %}", "the model's chat template rejects these messages: "),
        (7, "the model's chat template rejects these messages: "),
        (None, "this model has no chat template: send the prompt to /v1/completions"),
    ],
)
def test_what_a_template_refuses_is_one_line(tmp_path, template, message):
    tokenizer = load_tokenizer(save(tmp_path, byte_level_tokenizer(), tokenizer_config={"chat_template": template}))
    with pytest.raises(ConfigError, match=rf"^{message}.*$"):
        tokenizer.apply_chat_template([{"role": "robot", "content": "x"}])


def test_a_template_sees_the_variables_of_a_request(tmp_path):
    template = "{{ enable_thinking | default('unset') }} {{ add_generation_prompt }} {{ messages | length }}"
    tokenizer = load_tokenizer(save(tmp_path, byte_level_tokenizer(), tokenizer_config={"chat_template": template}))
    for variables, text in (
        (None, "unset True 1"),
        ({"enable_thinking": False}, "False True 1"),
        ({"add_generation_prompt": False, "tokenize": True}, "unset False 1"),
    ):
        assert tokenizer.decode(tokenizer.apply_chat_template([{"role": "user"}], variables)) == text


def test_half_a_character_is_no_bug(tokenizers):
    assert tokenizers["byte-level"].encode("\ud83d") == tokenizers["byte-level"].encode("?")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, set()),
        ({"config": {"eos_token_id": 5}}, {5}),
        ({"config": {"eos_token_id": 5}, "generation_config": {"eos_token_id": [7, 8]}}, {7, 8}),
        ({"generation_config": {"eos_token_id": 7}, "tokenizer_config": {"eos_token": "<|eos|>"}}, {1, 7}),
    ],
)
def test_end_of_sequence_ids(tmp_path, files, expected):
    assert load_tokenizer(save(tmp_path, byte_level_tokenizer(), **files)).eos_token_ids == expected


class Ticker:
    """A thread that wants a turn every millisecond."""

    def __enter__(self):
        self.longest, self._ends = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._ends.set()
        self._thread.join()

    def _run(self):
        before = time.perf_counter()
        while not self._ends.wait(0.001):
            now = time.perf_counter()
            self.longest, before = max(self.longest, now - before), now


def test_a_long_text_does_not_hold_up_other_threads(tokenizers):
    """The ratio decides, not the time: `Tokenizer.encode` of the library keeps the interpreter lock to its end."""
    text = "the quick brown fox jumps over the lazy dog " * 40_000
    with Ticker() as ticker:
        start = time.perf_counter()
        tokenizers["byte-level"].encode(text)
        whole = time.perf_counter() - start
    assert ticker.longest < max(0.1, whole / 3), f"paused for {ticker.longest:.3f} of {whole:.3f} s"


# ---- what a client sees of the tokens, and when


@pytest.mark.parametrize(
    ("stops", "data", "shown", "flushed", "stopped"),
    [
        ([], b"abc", ["a", "b", "c"], "", False),
        ([], "aé".encode(), ["a", "", "é"], "", False),  # an incomplete character is held back
        ([], b"a\xc3", ["a", ""], "\N{REPLACEMENT CHARACTER}", False),  # it never became one
        (["END"], b"abEND", ["a", "b", "", "", ""], "", True),
        (["END"], b"abENd", ["a", "b", "", "", "ENd"], "", False),
        (["END"], b"EEND", ["", "E", "", ""], "", True),
        (["aab"], b"aaab", ["", "", "a", ""], "", True),
        (["xyz", "y"], b"axy", ["a", "", "x"], "", True),
        (["b", "abc"], b"ab", ["", "a"], "", True),
        (["END"], b"aEN", ["a", "", ""], "EN", False),  # the beginning of a stop string
        (["a\N{REPLACEMENT CHARACTER}"], b"xa\xc3", ["x", "", ""], "", True),  # the flush completes it
    ],
)
def test_what_is_shown_at_once_and_at_the_end(stops, data, shown, flushed, stopped):
    text = byte_stream(stops)
    assert [text.push(byte) for byte in data] == shown
    assert (text.flush(), text.stopped) == (flushed, stopped)


def test_stops_are_ignored_until_they_may_count():
    text = byte_stream(["b"])
    assert [text.push(byte, may_stop=False) for byte in b"abb"] == ["a", "b", "b"]
    assert not text.stopped
    assert text.push(ord("b")) == ""
    assert text.stopped
