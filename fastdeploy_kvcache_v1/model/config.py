"""What a model looks like: the random one, or one of a Hugging Face `config.json`. Pure Python: no paddle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, TypeAlias

from ..attention.base import AttentionCacheBackend
from ..attention.geometry import CacheGeometry
from ..attention.registry import make_cache_backend
from ..errors import ConfigError, ModelError
from .hf_json import Fields, read_json

BYTE_VOCAB_SIZE = 264
"""256 bytes and the eight special tokens of `random_directory.py`."""

BLOCK_WISE_FP8 = "block_wise_fp8"
"""A cache dtype: fp8 values with a float32 scale for each token and head."""

CACHE_DTYPES = ("float32", "float16", "bfloat16", BLOCK_WISE_FP8)

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class ChecksumConfig:
    """The random model, see `checksum`: a cache of any layout, and no numbers but checksums of it."""

    family: str = "gqa"
    """Name in `attention.registry`."""
    num_layers: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
    kv_lora_rank: int = 128
    qk_rope_head_dim: int = 16
    vocab_size: int = BYTE_VOCAB_SIZE
    max_position: int = 32_768
    """Longest sequence, prompt and output together."""
    num_draft_layers: int = 0
    """1 with a layer that guesses the token after the next one, cached behind the others."""
    guessable: bool = False
    """Some tokens depend on the one before them alone: a draft layer guesses those."""

    @property
    def ranks_cache_alike(self) -> bool:
        """Whether every tensor-parallel rank's cache holds the same bytes, because it has no heads to split."""
        return self.family != "gqa"

    def shard(self, size: int) -> ChecksumConfig:
        """What one of `size` tensor-parallel ranks caches: its share of the heads, if there are heads to split.

        Raises `ConfigError` for a number of heads that `size` does not divide.
        """
        if self.ranks_cache_alike:
            return self
        if self.num_kv_heads % size:
            raise ConfigError(f"--tensor-parallel-size {size} must divide the model's num_kv_heads {self.num_kv_heads}")
        return replace(self, num_kv_heads=self.num_kv_heads // size)

    def cache_backend(self, *, block_size: int, dtype: str) -> AttentionCacheBackend:
        """What its cache looks like, with blocks of `block_size` tokens. Takes no memory; raises `ConfigError`.

        `dtype` is that of the values, or `BLOCK_WISE_FP8`. Sparse attention has a format of its own and ignores it.
        """
        if dtype not in CACHE_DTYPES:
            raise ConfigError(f"unsupported cache dtype {dtype!r}: choose one of {', '.join(CACHE_DTYPES)}")
        if dtype == BLOCK_WISE_FP8 and self.family == "mla":
            raise ConfigError(f"latent attention cannot be cached as {dtype}: choose float32, float16 or bfloat16")
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


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; without `kind` "llama3" only `theta` matters."""

    theta: float = 10_000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and variants of a decoder: pre-norm, rotary embedding, grouped-query attention, SwiGLU; see `llama`."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    """Longest sequence, prompt and output together."""
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """Bias of the attention's output projection."""
    qk_norm: bool = False
    """RMS norm over each query and key head."""

    family: ClassVar[str] = "gqa"
    """Name in `attention.registry`."""
    num_draft_layers: ClassVar[int] = 0
    ranks_cache_alike: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")

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

FAMILIES = ("gqa", "mla", "dsa")
"""Of the random model."""


def load_model_config(path: Path | None, family: str | None = None, *, mtp: bool = False) -> ModelConfig:
    """Of the model in directory `path`; None is the random model, of a `family` and with a draft layer if `mtp`.

    Raises `ModelError`, one line, when the directory has no usable `config.json` or it asks for what is not supported.
    """
    if path is None:
        if family not in (None, *FAMILIES):
            raise ModelError(f"unknown --model-family {family!r}: choose one of {', '.join(FAMILIES)}")
        return ChecksumConfig(family or FAMILIES[0], num_draft_layers=int(mtp), guessable=mtp)
    if mtp:
        raise ModelError(f"--mtp is for --model random: the draft layer of {path} cannot be read")
    if family is not None:
        raise ModelError(f"--model-family {family} is for --model random: {path} has a family of its own")
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist")
    config = Fields(str(path / "config.json"), read_json(path / "config.json"))
    return _checksum_config(config) if config.flag("checksum_model", False) else _llama_config(config)


def _checksum_config(config: Fields) -> ChecksumConfig:
    """Of a directory that `random_directory` wrote; with `kv_lora_rank` its cache is that of latent attention."""
    is_latent = "kv_lora_rank" in config.values
    return ChecksumConfig(
        family="mla" if is_latent else "gqa",
        kv_lora_rank=config.integer("kv_lora_rank", ChecksumConfig.kv_lora_rank),
        qk_rope_head_dim=config.integer("qk_rope_head_dim", ChecksumConfig.qk_rope_head_dim),
        num_layers=config.integer("num_hidden_layers"),
        num_kv_heads=config.integer("num_key_value_heads"),
        head_dim=config.integer("head_dim"),
        vocab_size=config.integer("vocab_size"),
        max_position=config.integer("max_position_embeddings"),
    )


def _llama_config(config: Fields) -> LlamaConfig:
    architecture = _architecture(config)
    _refuse_unsupported(config)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    bias = config.flag("attention_bias", False)
    return LlamaConfig(
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim", 128 if architecture == "qwen3" else max(1, hidden_size // num_heads)),
        vocab_size=config.integer("vocab_size"),
        max_position=config.integer("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=architecture == "qwen2" or bias,
        output_bias=architecture != "qwen2" and bias,
        qk_norm=architecture == "qwen3",
    )


def _rope(config: Fields) -> RopeConfig:
    """From `rope_theta` + `rope_scaling`, or from `rope_parameters`, which newer configurations have instead."""
    theta = config.number("rope_theta", 10_000.0)
    scaling = config.section("rope_parameters") or config.section("rope_scaling")
    rope = Fields(f"{config.source}: rope settings", scaling)
    theta = rope.number("rope_theta", theta)
    if rope.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{rope.source}: a partial rotary embedding is not supported")
    kind = rope.values.get("rope_type", rope.values.get("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind != "llama3":
        raise ModelError(f"{rope.source}: unsupported type {kind!r}: choose one of default, llama3")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if low >= high:
        raise ModelError(f"{rope.source}: low_freq_factor must be below high_freq_factor, got {low} and {high}")
    original = rope.integer("original_max_position_embeddings")
    return RopeConfig(theta, kind, rope.number("factor"), low, high, original)


def _architecture(config: Fields) -> str:
    names = config.values.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise ModelError(
            f"{config.source}: unsupported architecture {name!r}: choose one of {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def _refuse_unsupported(config: Fields) -> None:
    activation = config.values.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"{config.source}: unsupported hidden_act {activation!r}: only silu is supported")
    for name in ("mlp_bias", "use_sliding_window"):
        if config.flag(name, False):
            raise ModelError(f"{config.source}: {name} is not supported")
    if config.values.get("quantization_config"):
        raise ModelError(f"{config.source}: quantized weights are not supported")
