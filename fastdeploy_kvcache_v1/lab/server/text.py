"""Text to tokens and back: tokenizer and chat template of a model directory, and streamed text."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.decoders import DecodeStream

from ...errors import ConfigError, ModelError
from ..model.directory import RANDOM_DIRECTORY, converted, read_json

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else its import warns that torch is missing


class Tokenizer:
    """Immutable and thread-safe. Encoding a long text does not hold the interpreter lock."""

    def __init__(self, tokenizer: Any, eos_token_ids: frozenset[int]) -> None:
        """`tokenizer`: a `PreTrainedTokenizerFast`. Each of `eos_token_ids`, if any, ends a generation."""
        self._tokenizer = tokenizer
        self._rust: RustTokenizer = tokenizer.backend_tokenizer
        self.eos_token_ids = eos_token_ids
        self.image_token: str | None = getattr(tokenizer, "image_token", None)
        """Placeholder of a patch of an image; None for a model without images."""
        self.image_token_id: int | None = getattr(tokenizer, "image_token_id", None)
        self.vocab_size = max(tokenizer.get_vocab().values(), default=-1) + 1

    @property
    def has_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode(self, text: str) -> list[int]:
        """Ids of a raw prompt, with the special tokens around it."""
        return self._encode(text, add_special_tokens=True)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens. Invalid UTF-8 becomes U+FFFD, unknown ids vanish."""
        text: str = self._rust.decode(list(token_ids), skip_special_tokens=True)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Ids of a conversation of `{"role": ..., "content": ...}`, up to the assistant's next answer. A content is a
        text, or a list of parts with images. `variables` are for the template (`enable_thinking`, ...).

        Raises `ConfigError`, one line, when the messages do not fit the template.
        """
        if not self.has_template:
            raise ConfigError("this model has no chat template: send the prompt to /v1/completions")
        options = {"add_generation_prompt": True, **(variables or {}), "tokenize": False}
        try:
            text = self._tokenizer.apply_chat_template([dict(message) for message in messages], **options)
        except Exception as error:  # a template is code of the model's directory, and raises any exception
            raise ConfigError(f"the model's chat template rejects these messages: {_one_line(error)}") from error
        return self._encode(text, add_special_tokens=False)

    def stream(self, stops: Sequence[str] = ()) -> TextStream:
        return TextStream(self._rust, stops)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        text = text.encode("utf-8", errors="replace").decode()  # Rust takes no half surrogate pair
        # `encode` holds the interpreter lock: half a second for 450,000 characters.
        ids: list[int] = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids


class TextStream:
    """Text of one output in whole characters, cut before its first stop string. Not thread-safe.

    Holds back an end that could become a stop string, so released text stays valid.
    """

    def __init__(self, rust: RustTokenizer, stops: Sequence[str] = ()) -> None:
        self._rust = rust
        self._stops = tuple(stops)
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._undecoded: list[int] = []
        """Tokens without text yet, part of a character for example."""
        self._pending = ""
        self.stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Text to show now. Sets `stopped` at a stop string, unless `may_stop` is False."""
        return self._release(self._decode(token_id), looks=may_stop)

    def flush(self) -> str:
        """The remaining text, at the end of the output."""
        rest = self._rust.decode(self._undecoded, skip_special_tokens=True)
        shown = self._release(rest, looks=True)
        return shown if self.stopped else shown + self._pending

    def _decode(self, token_id: int) -> str:
        """Text that this token completes; "" within a character."""
        self._undecoded.append(token_id)
        try:
            text = self._decoder.step(self._rust, token_id) or ""
        except Exception:  # "invalid prefix", after invalid UTF-8: start anew, as vLLM does
            self._decoder = DecodeStream(skip_special_tokens=True)
            text = self._rust.decode(self._undecoded, skip_special_tokens=True)
        if text:
            self._undecoded.clear()
        return text

    def _release(self, text: str, *, looks: bool) -> str:
        self._pending += text
        found = [at for stop in self._stops if (at := self._pending.find(stop)) >= 0] if looks else []
        if found:
            self.stopped = True
            return self._cut(min(found))
        keep = max((_overlap(self._pending, stop) for stop in self._stops), default=0) if looks else 0
        return self._cut(len(self._pending) - keep)

    def _cut(self, at: int) -> str:
        released, self._pending = self._pending[:at], self._pending[at:]
        return released


class Ends(msgspec.Struct):
    """Entries of a model's JSON files for end tokens and vocabulary."""

    eos_token_id: int | list[int] | None = None
    vocab_size: int | None = None


def load_tokenizer(path: Path | None) -> Tokenizer:
    """The tokenizer of the model in `path`; None is the random model's. Raises `ModelError`, one line, for an unusable
    tokenizer, or one that does not fit the model.
    """
    path = path or RANDOM_DIRECTORY
    files = [path / f"{name}.json" for name in ("config", "generation_config")]
    config, generation = (converted(read_json(file) if file.exists() else {}, Ends, file) for file in files)
    pretrained = _pretrained(path)
    listed = config.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    ids = listed if isinstance(listed, list) else [] if listed is None else [listed]
    own = pretrained.eos_token_id
    tokenizer = Tokenizer(pretrained, frozenset(ids if own is None else [*ids, own]))
    model_vocab = config.vocab_size
    if model_vocab is not None and tokenizer.vocab_size > model_vocab:
        raise ModelError(
            f"{path / 'tokenizer.json'} has token ids up to {tokenizer.vocab_size - 1},"
            f" but the model has only {model_vocab} tokens"
        )
    return tokenizer


def _pretrained(path: Path) -> Any:
    """tokenizer.json, with the special tokens and the template of the files beside it."""
    if not (path / "tokenizer.json").is_file():
        raise ModelError(f"{path} is not a usable model directory: tokenizer.json is missing")
    from transformers import PreTrainedTokenizerFast  # takes 1.5 s

    try:
        return PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
    except Exception as error:  # a broken file raises exceptions of many kinds
        raise ModelError(f"{path} has no usable tokenizer: {_one_line(error)}") from error


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
