"""The weights of a decoder as NumPy arrays, laid out for `layers`: from a checkpoint, or random."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .checkpoint import Checkpoint
from .config import ModelConfig

Array = NDArray[np.float32]


class Source(Protocol):
    """Gives the tensor of a Hugging Face name, float32, in exactly the given shape."""

    def read(self, name: str, shape: tuple[int, ...]) -> Array: ...


@dataclass(frozen=True)
class LayerWeights:
    """One layer, all float32. The queries are scaled by `head_dim ** -0.5` already.

    Linear weights are `[out, in]`, as they are stored: a product of few rows reads them faster so.
    """

    input_norm: Array
    """`[hidden]`"""
    qkv: Array
    """`[(num_heads + 2 * num_kv_heads) * head_dim, hidden]`: all queries, all keys, all values."""
    qkv_bias: Array | None
    qk_norm: Array | None
    """`[(num_heads + num_kv_heads) * head_dim]`: the query norm's weights for each query head, then the keys'."""
    output: Array
    """`[hidden, num_heads * head_dim]`"""
    output_bias: Array | None
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


def load_weights(path: Path | None, config: ModelConfig) -> DecoderWeights:
    """From the safetensors files of `path`, or random ones that depend on `config.seed` only.

    Raises `ModelError` for a missing, misshapen or unreadable tensor.
    """
    if path is None:
        return _read_decoder(RandomSource(config.seed), config)
    with Checkpoint(path) as checkpoint:
        return _read_decoder(checkpoint, config)


class RandomSource:
    """Draws tensors in the order asked for, scaled so that attention is selective and activations keep their size."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.Generator(np.random.Philox(key=seed))

    def read(self, name: str, shape: tuple[int, ...]) -> Array:
        if name.endswith("norm.weight"):
            return np.ones(shape, dtype=np.float32)
        values = self._random.standard_normal(shape, dtype=np.float32)
        if name.endswith("embed_tokens.weight"):
            return values
        gain = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
        values *= np.float32(gain * shape[-1] ** -0.5)
        return values


def _read_decoder(source: Source, config: ModelConfig) -> DecoderWeights:
    table = (config.vocab_size, config.hidden_size)
    embedding = source.read("model.embed_tokens.weight", table)
    return DecoderWeights(
        embedding=embedding,
        layers=[_read_layer(source, config, index) for index in range(config.num_layers)],
        final_norm=source.read("model.norm.weight", (config.hidden_size,)),
        lm_head=embedding if config.tie_word_embeddings else source.read("lm_head.weight", table),
    )


def _read_layer(source: Source, config: ModelConfig, index: int) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    rows = {"q": config.num_heads * config.head_dim, "k": config.num_kv_heads * config.head_dim}
    rows["v"] = rows["k"]
    prefix = f"model.layers.{index}"

    def linear(name: str, shape: tuple[int, ...]) -> Array:
        return source.read(f"{prefix}.{name}.weight", shape)

    def vector(name: str, size: int) -> Array:
        return source.read(f"{prefix}.{name}", (size,))

    # The softmax scale rides on the queries: on their projection, or on their norm where one follows it.
    scale = np.float32(config.head_dim**-0.5)
    projection_scale = {"q": np.float32(1) if config.qk_norm else scale, "k": np.float32(1), "v": np.float32(1)}
    projections = [linear(f"self_attn.{p}_proj", (rows[p], hidden)) * projection_scale[p] for p in "qkv"]
    qkv_bias = qk_norm = output_bias = None
    if config.qkv_bias:
        qkv_bias = np.concatenate([vector(f"self_attn.{p}_proj.bias", rows[p]) * projection_scale[p] for p in "qkv"])
    if config.qk_norm:
        query = vector("self_attn.q_norm.weight", config.head_dim) * scale
        key = vector("self_attn.k_norm.weight", config.head_dim)
        qk_norm = np.concatenate([np.tile(query, config.num_heads), np.tile(key, config.num_kv_heads)])
    if config.output_bias:
        output_bias = vector("self_attn.o_proj.bias", hidden)
    return LayerWeights(
        input_norm=vector("input_layernorm.weight", hidden),
        qkv=np.concatenate(projections),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        output=linear("self_attn.o_proj", (hidden, rows["q"])),
        output_bias=output_bias,
        mlp_norm=vector("post_attention_layernorm.weight", hidden),
        gate=linear("mlp.gate_proj", (inner, hidden)),
        up=linear("mlp.up_proj", (inner, hidden)),
        down=linear("mlp.down_proj", (hidden, inner)),
    )
