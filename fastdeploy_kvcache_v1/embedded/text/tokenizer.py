"""Text to token ids and back: a byte tokenizer for the random model, `tokenizers` for a model directory.

Needs no paddle. Objects are immutable after loading and may be shared between threads; detokenizers may not.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ...errors import ConfigError
from ...model.config import BYTE_VOCAB_SIZE


class Detokenizer(Protocol):
    """Turns a growing token sequence into text, never emitting a part of a character.

    All texts from `push` and the one from `flush`, joined, equal `decode` of all pushed ids.
    """

    def push(self, token_id: int) -> str:
        """Text that became certain with this token, often "" while a character is incomplete."""

    def flush(self) -> str:
        """The rest at the end of the sequence, incomplete characters replaced by U+FFFD. Nothing may follow."""


class TextTooLongError(Exception):
    """A text that certainly has more tokens than it may have."""

    def __init__(self, size: int) -> None:
        """`size` of the text in bytes."""
        super().__init__(size)
        self.size = size


class Tokenizer(Protocol):
    @property
    def has_template(self) -> bool:
        """Chats are put together by code of the model's directory: a template may hang, or need any memory."""

    def compile_template(self) -> None:
        """Raises `ModelError` when the template is no template. Without it, the first chat does so."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Any of these ends a generation; may be empty."""

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        """Ids of a raw prompt, with the special tokens that the model expects around one.

        Raises `TextTooLongError`, before any work, for a text that cannot be said in `most` tokens. Other texts may
        turn out to be longer: count.
        """

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; invalid UTF-8 becomes U+FFFD and unknown ids vanish."""

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        most: int | None = None,
    ) -> list[int]:
        """Ids of a conversation (`{"role": ..., "content": ...}` each), ending where the assistant speaks next.

        `variables` are for the model's template (`enable_thinking`, ...); without a template they mean nothing.
        Raises `ConfigError` when the messages do not fit the model's template, `TextTooLongError` like `encode`.
        """

    def detokenizer(self) -> Detokenizer:
        """For one output sequence."""


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Of the model in directory `path`; None is the byte tokenizer.

    Raises `ModelError`, one line, when the directory has no usable tokenizer.
    """
    if path is None:
        return ByteTokenizer()
    # tokenizers and jinja2 are needed for model directories only.
    from .hf_tokenizer import HFTokenizer

    return HFTokenizer.load(path)


class ByteTokenizer:
    """One token per UTF-8 byte, and special tokens above them that no text can produce."""

    BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, END_OF_TURN, PAD = range(256, BYTE_VOCAB_SIZE)
    ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}  # noqa: RUF012

    vocab_size = BYTE_VOCAB_SIZE
    eos_token_ids = frozenset({EOS, END_OF_TURN})
    has_template = False

    def compile_template(self) -> None:
        """There is none."""

    def encode(self, text: str, *, most: int | None = None) -> list[int]:
        data = _utf8(text)
        _require_at_most(len(data), most)
        return [self.BOS, *data]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        *,
        most: int | None = None,
    ) -> list[int]:
        ids = [self.BOS]
        for message in messages:
            role, content = message.get("role"), message.get("content") or ""
            if role not in self.ROLES:
                raise ConfigError(f"unknown message role {role!r}: choose one of {', '.join(self.ROLES)}")
            if not isinstance(content, str):
                raise ConfigError(f"the content of a message must be text, got {type(content).__name__}")
            data = _utf8(content)
            _require_at_most(len(ids) + len(data), most)
            ids += [self.ROLES[role], *data, self.END_OF_TURN]
        return [*ids, self.ASSISTANT]

    def detokenizer(self) -> Detokenizer:
        return ByteDetokenizer()


class ByteDetokenizer:
    """The standard library's incremental decoder, fed with byte tokens; special tokens say nothing."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(bytes([token_id])) if token_id < 256 else ""

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


def _require_at_most(size: int, most: int | None) -> None:
    if most is not None and size > most:
        raise TextTooLongError(size)


def _utf8(text: str) -> bytes:
    # A caller's text can carry half of a surrogate pair, which has no UTF-8 form.
    return text.encode("utf-8", errors="replace")
