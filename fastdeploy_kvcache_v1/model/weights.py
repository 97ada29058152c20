"""The weights of a decoder as NumPy arrays, laid out for `layers`: from a checkpoint, or random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .attention import AttentionWeights
from .attention_families import family_of
from .checkpoint import Checkpoint
from .config import ModelConfig
from .weight_source import Array, RandomSource, Source


@dataclass(frozen=True)
class LayerWeights:
    """One layer, all float32. Linear weights are `[out, in]`, as they are stored: a product of few rows reads them
    faster so."""

    input_norm: Array
    """`[hidden]`"""
    attention: AttentionWeights
    mlp_norm: Array
    """`[hidden]`"""
    gate: Array
    up: Array
    """`[intermediate, hidden]` both"""
    down: Array
    """`[hidden, intermediate]`"""


@dataclass(frozen=True)
class DecoderWeights:
    embedding: Array
    """`[vocab, hidden]`"""
    layers: list[LayerWeights]
    final_norm: Array
    """`[hidden]`"""
    lm_head: Array
    """`[vocab, hidden]`; the embedding itself when they are tied."""
    draft: DraftWeights | None
    """None without a draft layer, else the last of `layers` is one."""


@dataclass(frozen=True)
class DraftWeights:
    """What leads into the draft layer: a token's embedding beside the hidden state of the token before it."""

    embedding_norm: Array
    hidden_norm: Array
    """`[hidden]` both"""
    join: Array
    """`[hidden, 2 * hidden]`"""


def load_weights(path: Path | None, config: ModelConfig) -> DecoderWeights:
    """From the safetensors files of `path`, or random ones that depend on `config.seed` only.

    Raises `ModelError` for a missing, misshapen or unreadable tensor.
    """
    if path is None:
        return read_decoder(RandomSource(config.seed, config.random_layer_gain), config)
    with Checkpoint(path) as checkpoint:
        return read_decoder(checkpoint, config)


def read_decoder(source: Source, config: ModelConfig) -> DecoderWeights:
    """By the names of Hugging Face's models."""
    table = (config.vocab_size, config.hidden_size)
    embedding = source.read("model.embed_tokens.weight", table)
    layers = [_read_layer(source, config, index) for index in range(config.num_layers)]
    final_norm = source.read("model.norm.weight", (config.hidden_size,))
    lm_head = embedding if config.tie_word_embeddings else source.read("lm_head.weight", table)
    # Behind all others: random weights of the model are the same with and without it.
    draft = None
    if config.num_draft_layers:
        draft = _read_draft(source, config)
        layers.append(_read_layer(source, config, config.num_layers))
    return DecoderWeights(embedding, layers, final_norm, lm_head, draft)


def _read_draft(source: Source, config: ModelConfig) -> DraftWeights:
    hidden, prefix = config.hidden_size, f"model.layers.{config.num_layers}"
    return DraftWeights(
        embedding_norm=source.read(f"{prefix}.enorm.weight", (hidden,)),
        hidden_norm=source.read(f"{prefix}.hnorm.weight", (hidden,)),
        join=source.read(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden)),
    )


def _read_layer(source: Source, config: ModelConfig, index: int) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    prefix = f"model.layers.{index}"
    attention = family_of(config).read(source, prefix, config)
    return LayerWeights(
        input_norm=source.read(f"{prefix}.input_layernorm.weight", (hidden,)),
        attention=attention,
        mlp_norm=source.read(f"{prefix}.post_attention_layernorm.weight", (hidden,)),
        gate=source.read(f"{prefix}.mlp.gate_proj.weight", (inner, hidden)),
        up=source.read(f"{prefix}.mlp.up_proj.weight", (inner, hidden)),
        down=source.read(f"{prefix}.mlp.down_proj.weight", (hidden, inner)),
    )
