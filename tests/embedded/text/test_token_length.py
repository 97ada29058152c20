"""How much text fits a token: never so little that a prompt is refused that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from fastdeploy_kvcache_v1.embedded.text.token_length import TokenLength, token_length
from tests.model.model_dirs import byte_fallback_tokenizer, byte_level_tokenizer


def with_normalizer(normalizer):
    tokenizer = byte_level_tokenizer()
    tokenizer.normalizer = normalizer
    return tokenizer


def without_a_byte():
    """As SmolLM2's: bytes that its texts never had are in no token, and vanish."""
    vocab = {sign: index for index, sign in enumerate(sorted(set(pre_tokenizers.ByteLevel.alphabet()) - {"Ā"}))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


KNOWN = {
    "byte-level": byte_level_tokenizer(),
    "byte-fallback": byte_fallback_tokenizer(),
    "nfc": with_normalizer(normalizers.NFC()),
    "llama": with_normalizer(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "without a byte": without_a_byte(),
}


@pytest.mark.parametrize("kind", KNOWN)
@given(text=st.text(max_size=60) | st.text("a\u0301\u1100\u1161\u11a8\u212b\x00 <|eos>h", max_size=60))
def test_no_text_that_fits_is_refused(kind, text):
    tokenizer = KNOWN[kind]
    length = token_length(tokenizer)
    num_tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert not length.exceeds(text.encode(), num_tokens)


def test_a_text_that_cannot_fit_is_refused():
    length = token_length(byte_level_tokenizer())
    assert length == TokenLength(longest=len("<|bos|>"))
    assert not length.exceeds(b"x" * 70, 10)
    assert length.exceeds(b"x" * 71, 10)


def test_bytes_that_vanish_do_not_count():
    length = token_length(without_a_byte())
    assert length.vanishing == b"\0"
    assert not length.exceeds(b"x" + b"\0" * 1000, 10)
