"""Rotary position embedding: frequencies of the supported scaling types, and the tables made from them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from .hf_json import Fields

SCALING_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """`kind` is one of `SCALING_TYPES`; the last three fields matter to `llama3` only."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def parse_rope(config: Fields) -> RopeConfig:
    """From `rope_theta` + `rope_scaling`, or from `rope_parameters`, which newer configurations have instead.

    Raises `ModelError` for an unknown scaling type or broken values.
    """
    parameters = config.section("rope_parameters")
    theta = config.number("rope_theta", 10_000.0)
    rope = Fields(f"{config.source}: rope settings", parameters or config.section("rope_scaling"))
    theta = rope.number("rope_theta", theta)
    if rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{rope.source}: a partial rotary embedding is not supported")
    kind = _kind(rope)
    if kind == "default":
        return RopeConfig(theta)
    factor = rope.number("factor")
    if kind == "linear":
        return RopeConfig(theta, kind, factor)
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ModelError(f"{rope.source}: low_freq_factor must be below high_freq_factor, got {low} and {high}")
    return RopeConfig(theta, kind, factor, low, high, rope.integer("original_max_position_embeddings"))


def _kind(rope: Fields) -> str:
    kind: Any = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind not in SCALING_TYPES:
        raise ModelError(f"{rope.source}: unsupported type {kind!r}: choose one of {', '.join(SCALING_TYPES)}")
    return str(kind)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> NDArray[np.float64]:
    """Angle per position of each of the `head_dim // 2` rotated pairs."""
    frequencies = rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        # Llama 3.1 keeps the fast pairs, slows the slow ones down by `factor`, and blends in between, where the
        # measure is how often a pair turns within the original context length.
        turns = rope.original_max_position * frequencies / (2 * math.pi)
        blend = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = np.clip(blend, 0.0, 1.0)
        return (1 - blend) * frequencies / rope.factor + blend * frequencies
    return frequencies


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """`(cos, sin)` of the angles, each float32 `[num_positions, head_dim // 2]`."""
    angles = np.outer(np.arange(num_positions, dtype=np.float64), inverse_frequencies(rope, head_dim))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
