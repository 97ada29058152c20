"""The tokenizer of the random model: a token is a byte."""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from ...model.config import BYTE_VOCAB_SIZE
from ...model.vision import Image
from .tokenizer import Detokenizer, TextTooLongError


class ByteTokenizer:
    """One token per UTF-8 byte, and special tokens above them that no text can produce."""

    BOS, EOS, SYSTEM, USER, ASSISTANT, TOOL, END_OF_TURN, IMAGE = range(256, BYTE_VOCAB_SIZE)
    ROLES = {"system": SYSTEM, "developer": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}  # noqa: RUF012

    vocab_size = BYTE_VOCAB_SIZE
    eos_token_ids = frozenset({EOS, END_OF_TURN})
    has_template = False
    image_token_id = IMAGE

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
            data: list[int] = []
            for part in content if isinstance(content, list) else [content]:
                data += self._part(part)
                _require_at_most(len(ids) + len(data), most)
            ids += [self.ROLES[role], *data, self.END_OF_TURN]
        return [*ids, self.ASSISTANT]

    def _part(self, part: object) -> Sequence[int]:
        if isinstance(part, Image):
            return [self.IMAGE] * part.num_tokens
        if not isinstance(part, str):
            raise ConfigError(f"the content of a message must be text, got {type(part).__name__}")
        return _utf8(part)

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
