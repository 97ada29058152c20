"""How much text fits one token? Tells that a text is too long without reading it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, models

NFC_FACTOR = 4
"""A text in normal form C has at most so many times its bytes in another form of Unicode (three, for UTF-8)."""

KEEPING = {"ByteLevel", "Digits", "Metaspace", "Punctuation"}
"""Pre-tokenizers that drop nothing, whatever their settings."""


@dataclass(frozen=True)
class TokenLength:
    longest: int
    """Bytes of text (UTF-8) in one token at most."""
    vanishing: bytes = b""
    """Bytes that are in no token: the tokenizer drops them, however many."""

    def exceeds(self, text: bytes, most: int) -> bool:
        """`text` certainly has more than `most` tokens."""
        room = most * self.longest
        return len(text) > room and len(text.translate(None, self.vanishing)) > room


def token_length(rust: Tokenizer) -> TokenLength | None:
    """None for a tokenizer that may make any length of text vanish.

    Known are byte-level BPE and BPE with byte fallback, as nearly all models have them. There, text vanishes only in
    normalizers, pre-tokenizers and added tokens that strip spaces.
    """
    vocabulary = rust.get_vocab(with_added_tokens=True)
    factor = _normalizer_factor(_state(rust.normalizer))
    splitter = _state(rust.pre_tokenizer)
    if (
        factor is None
        or not isinstance(rust.model, models.BPE)
        or rust.truncation is not None
        or any(token.lstrip or token.rstrip for token in rust.get_added_tokens_decoder().values())
        or not _keeps_everything(splitter)
    ):
        return None
    longest = factor * max(len(token.encode("utf-8", errors="replace")) for token in vocabulary)
    if rust.model.byte_fallback:
        has_all_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
        return TokenLength(longest) if has_all_bytes else None
    if "ByteLevel" not in _types(splitter):
        return None
    return TokenLength(longest, bytes(byte for byte, sign in _byte_signs().items() if sign not in vocabulary))


def _byte_signs() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary: itself where it can be printed, else one
    from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


def _state(component: Any) -> dict[str, Any] | None:
    return None if component is None else json.loads(component.__getstate__())


def _normalizer_factor(state: dict[str, Any] | None) -> int | None:
    """How much longer a text can be than what is left of it; None for a normalizer that may remove any length."""
    if state is None or state["type"] == "Prepend":
        return 1
    if state["type"] == "NFC":
        return NFC_FACTOR
    if state["type"] == "Replace":
        pattern = state["pattern"].get("String")
        return 1 if pattern is not None and len(pattern.encode()) <= len(state["content"].encode()) else None
    if state["type"] == "Sequence":
        product = 1
        for part in state["normalizers"]:
            factor = _normalizer_factor(part)
            if factor is None:
                return None
            product *= factor
        return product
    return None


def _keeps_everything(state: dict[str, Any] | None) -> bool:
    if state is None or state["type"] in KEEPING:
        return True
    if state["type"] == "Sequence":
        return all(_keeps_everything(part) for part in state["pretokenizers"])
    return bool(state["type"] == "Split" and state["behavior"] != "Removed")


def _types(state: dict[str, Any] | None) -> set[str]:
    if state is None:
        return set()
    return {state["type"]}.union(*(_types(part) for part in state.get("pretokenizers", ())))
