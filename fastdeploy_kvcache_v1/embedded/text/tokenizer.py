"""Text to token ids and back: what every tokenizer can do.

None needs paddle. Objects are immutable after loading and may be shared between threads; detokenizers may not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


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
    def image_token_id(self) -> int | None:
        """Placeholder of a patch of an image; None for a model that sees none."""

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

        Where there is an `image_token_id`, a content may be a list of texts and images, too.
        `variables` are for the model's template (`enable_thinking`, ...); without a template they mean nothing.
        Raises `ConfigError` when the messages do not fit the model's template, `TextTooLongError` like `encode`.
        """

    def detokenizer(self) -> Detokenizer:
        """For one output sequence."""
