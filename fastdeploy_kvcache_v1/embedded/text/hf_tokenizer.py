"""The tokenizer of a Hugging Face model directory: `tokenizer.json` and what its neighbours say about it."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from ...errors import ModelError
from ...model.hf_json import read_file, read_optional_json
from .chat_template import ChatTemplate
from .token_length import TokenLength, token_length
from .tokenizer import Detokenizer, TextTooLongError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_REPLACEMENT = "\ufffd"

MAX_CHARACTER_BYTES = 4
"""Of UTF-8; also the most tokens of which each holds a part of one character."""

MAX_HELD_BACK = 4 * MAX_CHARACTER_BYTES
"""Tokens without an end of a character among them after which the oldest are let go."""


class HFTokenizer:
    """Wraps a `tokenizers.Tokenizer`. The contract is that of `tokenizer.Tokenizer`."""

    image_token_id: int | None = None

    def __init__(self, rust: RustTokenizer, eos_token_ids: frozenset[int], template: ChatTemplate) -> None:
        self._rust = rust
        self._template = template
        self.eos_token_ids = eos_token_ids
        vocabulary = rust.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values(), default=-1) + 1
        byte_tokens = {index for token, index in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)}
        special_tokens = {index for index, token in rust.get_added_tokens_decoder().items() if token.special}
        self._text_tokens = frozenset(vocabulary.values()) - byte_tokens - special_tokens

    @classmethod
    def load(cls, path: Path) -> HFTokenizer:
        """Raises `ModelError`, one line, for a missing or broken file or one that does not fit the model."""
        rust = _read_rust_tokenizer(path)
        settings = read_optional_json(path / "tokenizer_config.json")
        config = read_optional_json(path / "config.json")
        template = ChatTemplate.load(path, settings)
        tokenizer = cls(rust, _eos_token_ids(rust, path, settings, config), template)
        model_vocab = config.get("vocab_size")
        if isinstance(model_vocab, int) and tokenizer.vocab_size > model_vocab:
            raise ModelError(
                f"{path / 'tokenizer.json'} has token ids up to {tokenizer.vocab_size - 1},"
                f" but the model has only {model_vocab} tokens"
            )
        return tokenizer

    @property
    def has_template(self) -> bool:
        return self._template.exists

    def compile_template(self) -> None:
        self._template.compile()

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        return self._encode(text, most, add_special_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._rust.decode(list(token_ids), skip_special_tokens=True)
        return text

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        most: int | None = None,
    ) -> list[int]:
        # The template writes the special tokens itself, and may leave out parts of the messages: its text counts.
        return self._encode(self._template.render(messages, variables), most, add_special_tokens=False)

    def _encode(self, text: str, most: int | None, *, add_special_tokens: bool) -> list[int]:
        data = text.encode("utf-8", errors="replace")  # a template can write half a surrogate pair, Rust strings cannot
        if most is not None and len(data) > most and self._length is not None and self._length.exceeds(data, most):
            raise TextTooLongError(len(data))
        ids: list[int] = self._rust.encode(data.decode(), add_special_tokens=add_special_tokens).ids
        return ids

    @functools.cached_property
    def _length(self) -> TokenLength | None:
        return token_length(self._rust)

    def detokenizer(self) -> Detokenizer:
        return HFDetokenizer(self, self._text_tokens)


class HFDetokenizer:
    """Decodes a short window twice per token: the text already emitted, and the same with the new tokens.

    The window's older part starts at a token that produced text, so what a decoder does to the first token of a
    text (it strips a space) happens to both and cancels out. Two kinds of ends are held back: U+FFFD, which may be a
    character whose bytes are still to come, and byte-fallback tokens, whose run is judged valid UTF-8 only as a whole
    (special and unknown tokens have no text and do not end such a run).

    Bytes that never become characters would be held back without end, and decoded again with every token: when they get
    many, those too old to belong to the last character are let go. So a token costs O(1).
    """

    def __init__(self, tokenizer: HFTokenizer, text_tokens: frozenset[int]) -> None:
        """`text_tokens`: those that are neither single bytes nor special."""
        self._tokenizer = tokenizer
        self._text_tokens = text_tokens
        self._window: list[int] = []
        self._emitted = 0
        """Tokens at the window's start whose text is out."""

    def push(self, token_id: int) -> str:
        self._window.append(token_id)
        return self._advance(final=False) if token_id in self._text_tokens else ""

    def flush(self) -> str:
        return self._advance(final=True)

    def _advance(self, *, final: bool) -> str:
        old = self._tokenizer.decode(self._window[: self._emitted])
        new = self._tokenizer.decode(self._window)
        text = new[len(old) :]
        if text.endswith(_REPLACEMENT) and not final:
            held_back = len(self._window) - self._emitted
            return self._let_go(old, new) if held_back >= MAX_HELD_BACK else ""
        if text:
            self._cut(len(self._window))
        return text

    def _let_go(self, old: str, new: str) -> str:
        """Text up to a token boundary inside the window that no later token can change; "" when there is none.

        Between whole characters the texts on both sides add up to the whole. The side behind it is longer than a
        character, so that is settled.
        """
        last = len(self._window) - MAX_CHARACTER_BYTES
        for end in range(last, last - MAX_CHARACTER_BYTES, -1):
            text = self._tokenizer.decode(self._window[:end])
            if text + self._tokenizer.decode(self._window[end:]) == new:
                self._cut(end)
                return text[len(old) :]
        return ""

    def _cut(self, end: int) -> None:
        """The text of the window's tokens before `end` is out."""
        self._window, self._emitted = self._window[self._emitted :], end - self._emitted


def _read_rust_tokenizer(path: Path) -> RustTokenizer:
    file = path / "tokenizer.json"
    content = read_file(file)
    try:
        return RustTokenizer.from_buffer(content)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"cannot read {file}: {' '.join(str(error).split())}") from error


def _eos_token_ids(
    rust: RustTokenizer, path: Path, settings: Mapping[str, Any], config: Mapping[str, Any]
) -> frozenset[int]:
    """What generation_config.json says, else config.json; and the tokenizer's own eos token in any case."""
    generation = read_optional_json(path / "generation_config.json")
    listed = generation.get("eos_token_id", config.get("eos_token_id"))
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    if not all(isinstance(index, int) for index in ids):
        raise ModelError(f"{path}: eos_token_id must be an integer or a list of integers, got {listed!r}")
    own = settings.get("eos_token")
    own = own.get("content") if isinstance(own, dict) else own
    own_id = rust.token_to_id(own) if isinstance(own, str) else None
    return frozenset(ids if own_id is None else [*ids, own_id])
