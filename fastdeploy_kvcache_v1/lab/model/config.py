"""Descriptions of models: the random one, or a Hugging Face `config.json`. Needs no paddle."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias

from msgspec import Meta, Struct
from msgspec.structs import force_setattr, replace

from ...attention.base import AttentionCacheBackend
from ...attention.layouts import CacheGeometry, make_cache_backend, needed_numbers
from ...config import one_of
from ...errors import ConfigError, ModelError
from .directory import converted, read_json

BYTE_VOCAB_SIZE = 264
"""256 bytes and the eight special tokens of `directory.py`."""

BLOCK_WISE_FP8 = "block_wise_fp8"
"""A cache dtype: fp8 values with a float32 scale for each token and head."""

DEFAULT_FAMILY = "gqa"

CACHE_DTYPES = ("float32", "float16", "bfloat16", BLOCK_WISE_FP8)

LLAMA, QWEN2, QWEN3 = ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")

NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_position": "max_position_embeddings",
}
"""Our names -> Hugging Face's, where they differ."""

PARTIAL_ROTARY = "a partial rotary embedding is not supported"

Size = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Positive = Annotated[float, Meta(gt=0)]


class ChecksumConfig(Struct, frozen=True, rename=NAMES):
    """The random model (`checksum`), with a cache of any layout."""

    family: str = DEFAULT_FAMILY
    """Name in `attention.layouts`."""
    num_layers: Size = 4
    num_kv_heads: Size = 4
    head_dim: Size = 16
    kv_lora_rank: Size = 128
    qk_rope_head_dim: Size = 16
    vocab_size: Size = BYTE_VOCAB_SIZE
    max_position: Size = 32_768
    """Longest sequence, prompt and output together."""
    num_draft_layers: int = 0
    """1 with a layer that guesses the token after the next one. Its cache is behind the others."""
    guessable: bool = False
    """Some tokens depend on the one before them alone, and a draft layer guesses them."""

    @property
    def ranks_cache_alike(self) -> bool:
        """True: without heads to split, all ranks cache the same bytes."""
        return "num_kv_heads" not in needed_numbers(self.family)

    def shard(self, size: int) -> ChecksumConfig:
        """The cache of one of `size` tensor-parallel ranks: its share of the heads, if any.

        Raises `ConfigError` if `size` does not divide the heads.
        """
        if self.ranks_cache_alike:
            return self
        if self.num_kv_heads % size:
            raise ConfigError(f"--tensor-parallel-size {size} must divide the model's num_kv_heads {self.num_kv_heads}")
        return replace(self, num_kv_heads=self.num_kv_heads // size)

    def cache_backend(self, *, block_size: int, dtype: str) -> AttentionCacheBackend:
        """The layout of its cache in blocks of `block_size` tokens. Takes no memory. Raises `ConfigError`.

        `dtype` of the values, or `BLOCK_WISE_FP8`. Sparse attention has its own format and ignores it.
        """
        one_of("the cache dtype", CACHE_DTYPES, dtype)
        geometry = CacheGeometry(
            num_layers=self.num_layers + self.num_draft_layers,
            block_size=block_size,
            dtype="uint8" if dtype == BLOCK_WISE_FP8 else dtype,
            scale_dtype="float32" if dtype == BLOCK_WISE_FP8 else None,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_lora_rank=self.kv_lora_rank,
            qk_rope_head_dim=self.qk_rope_head_dim,
            index_head_dim=128,
        )
        return make_cache_backend(self.family, geometry)


class RopeConfig(Struct, frozen=True):
    """Rotary embedding by Hugging Face's names. Without type "llama3" only `rope_theta` counts."""

    rope_type: str = ""
    type: str = "default"
    """Name in older configurations."""
    rope_theta: Positive = 0.0
    """0: the value beside these settings."""
    partial_rotary_factor: float = 1.0
    factor: Positive = 0.0
    low_freq_factor: Positive = 0.0
    high_freq_factor: Positive = 0.0
    original_max_position_embeddings: Size = 0

    @property
    def kind(self) -> str:
        return self.rope_type or self.type

    def __post_init__(self) -> None:
        if self.partial_rotary_factor != 1:
            raise ValueError(PARTIAL_ROTARY)
        if self.kind not in ("default", "llama3"):
            raise ValueError(f"unsupported rope type {self.kind!r}: choose one of default, llama3")
        is_complete = self.factor and self.original_max_position_embeddings
        if self.kind == "llama3" and not (is_complete and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError(
                "rope type llama3 needs factor, low_freq_factor, a greater high_freq_factor and"
                " original_max_position_embeddings"
            )


class LlamaConfig(Struct, frozen=True, kw_only=True, rename=NAMES):
    """Sizes and variants of a decoder: pre-norm, rotary embedding, grouped-query attention, SwiGLU; see `llama`.

    Defaults are Hugging Face's. The constructor raises `ValueError` for values that `llama` does not compute.
    """

    architectures: tuple[str, ...] = ()
    num_layers: Size
    hidden_size: Size
    intermediate_size: Size
    num_heads: Size
    num_kv_heads: Size = 0
    """0: as many as heads, set by the constructor."""
    head_dim: Size = 0
    """0: by the hidden size or the architecture, set by the constructor."""
    vocab_size: Size
    max_position: Size
    """Longest sequence, prompt and output together."""
    rms_norm_eps: Positive = 1e-6
    rope_theta: Positive = 10_000.0
    partial_rotary_factor: float = 1.0
    rope_scaling: RopeConfig | None = None
    rope_parameters: RopeConfig | None = None
    """Name in newer configurations."""
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    hidden_act: str = "silu"
    mlp_bias: bool = False
    use_sliding_window: bool = False
    quantization_config: Any = None

    family: ClassVar[str] = "gqa"
    """Name in `attention.layouts`."""
    num_draft_layers: ClassVar[int] = 0
    ranks_cache_alike: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not self.architectures or self.architectures[0] not in ARCHITECTURES:
            choices = ", ".join(ARCHITECTURES)
            raise ValueError(f"unsupported architecture {self.architectures}: choose one of {choices}")
        if self.hidden_act != "silu":
            raise ValueError(f"unsupported hidden_act {self.hidden_act!r}: only silu is supported")
        for name in ("mlp_bias", "use_sliding_window", "quantization_config"):
            if getattr(self, name):
                raise ValueError(f"{name} is not supported")
        if self.attention_bias and not self.qkv_bias:
            raise ValueError("attention_bias is not supported")
        if self.partial_rotary_factor != 1:
            raise ValueError(PARTIAL_ROTARY)
        force_setattr(self, "num_kv_heads", self.num_kv_heads or self.num_heads)
        head_dim = 128 if QWEN3 in self.architectures else max(1, self.hidden_size // self.num_heads)
        force_setattr(self, "head_dim", self.head_dim or head_dim)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")

    @property
    def rope(self) -> RopeConfig:
        given = self.rope_parameters or self.rope_scaling or RopeConfig()
        return replace(given, rope_theta=given.rope_theta or self.rope_theta)

    @property
    def qkv_bias(self) -> bool:
        return QWEN2 in self.architectures

    @property
    def qk_norm(self) -> bool:
        """RMS norm over each query and key head."""
        return QWEN3 in self.architectures

    def shard(self, size: int) -> LlamaConfig:
        """Raises `ConfigError` for more than one rank."""
        if size > 1:
            raise ConfigError(f"--tensor-parallel-size {size} is for --model random: leave it out")
        return self

    def cache_backend(self, *, block_size: int, dtype: str) -> AttentionCacheBackend:
        """As `ChecksumConfig.cache_backend`, of float32 alone."""
        if dtype != "float32":
            raise ConfigError(f"a cache of {dtype} is for --model random: the model computes with float32")
        return make_cache_backend(
            self.family,
            CacheGeometry(
                num_layers=self.num_layers,
                block_size=block_size,
                dtype=dtype,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
            ),
        )


ModelConfig: TypeAlias = ChecksumConfig | LlamaConfig


def load_model_config(path: Path | None, family: str | None = None, *, mtp: bool = False) -> ModelConfig:
    """The model in directory `path`. None: the random model, of a `family` and with a draft layer if `mtp`.

    Raises `ModelError`, one line, for a missing or unsupported `config.json`.
    """
    if path is None:
        return ChecksumConfig(family or DEFAULT_FAMILY, num_draft_layers=int(mtp), guessable=mtp)
    if mtp:
        raise ModelError(f"--mtp is for --model random: the draft layer of {path} cannot be read")
    if family is not None:
        raise ModelError(f"--model-family {family} is for --model random: {path} has a family of its own")
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist")
    source = path / "config.json"
    given = read_json(source)
    if not given.get("checksum_model"):
        return converted(given, LlamaConfig, source)
    # Made by `write_random_directory`; with `kv_lora_rank` it has the cache of latent attention.
    return replace(converted(given, ChecksumConfig, source), family="mla" if "kv_lora_rank" in given else "gqa")
