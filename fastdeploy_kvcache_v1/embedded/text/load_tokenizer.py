"""Which tokenizer a model has."""

from __future__ import annotations

from pathlib import Path

from .byte_tokenizer import ByteTokenizer
from .tokenizer import Tokenizer


def load_tokenizer(path: Path | None) -> Tokenizer:
    """Of the model in directory `path`; None is the byte tokenizer.

    Raises `ModelError`, one line, when the directory has no usable tokenizer.
    """
    if path is None:
        return ByteTokenizer()
    # tokenizers and jinja2 are needed for model directories only.
    from .hf_tokenizer import HFTokenizer

    return HFTokenizer.load(path)
