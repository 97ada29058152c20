"""Text to token ids and back: a byte tokenizer for the random model, `tokenizers` for a model directory.

Needs no paddle. Objects are immutable after loading and may be shared between threads; detokenizers may not.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from ..errors import ConfigError
from .model.config import BYTE_VOCAB_SIZE


class Detokenizer(Protocol):
    """Turns a growing token sequence into text, never emitting a part of a character.

    All texts from `push` and the one from `flush`, joined, equal `decode` of all pushed ids.
    """

    def push(self, token_id: int) -> str:
        """Text that became certain with this token, often "" while a character is incomplete."""

    def flush(self) -> str:
        """The rest at the end of the sequence, incomplete characters replaced by U+FFFD. Nothing may follow."""


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Any of these ends a generation; may be empty."""

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the special tokens that the model expects around one."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens; invalid UTF-8 becomes U+FFFD and unknown ids vanish."""

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Ids of a conversation (`{"role": ..., "content": ...}` each), ending where the assistant speaks next.

        Raises `ConfigError` when the messages do not fit the model's template.
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

    def encode(self, text: str) -> list[int]:
        return [self.BOS, *_utf8(text)]

    def decode(self, token_ids: Sequence[int]) -> str:
        return bytes(token for token in token_ids if token < 256).decode("utf-8", errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        ids = [self.BOS]
        for message in messages:
            role, content = message.get("role"), message.get("content") or ""
            if role not in self.ROLES:
                raise ConfigError(f"unknown message role {role!r}: choose one of {', '.join(self.ROLES)}")
            if not isinstance(content, str):
                raise ConfigError(f"the content of a message must be text, got {type(content).__name__}")
            ids += [self.ROLES[role], *_utf8(content), self.END_OF_TURN]
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


def _utf8(text: str) -> bytes:
    # JSON can carry half of a surrogate pair, which has no UTF-8 form.
    return text.encode("utf-8", errors="replace")
