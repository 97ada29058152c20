"""What a decoder model looks like, read from a Hugging Face `config.json`. Pure Python: no paddle."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from ..attention.base import AttentionCacheBackend
from ..attention.geometry import CacheGeometry
from ..attention.registry import make_cache_backend
from ..errors import ConfigError, ModelError
from .hf_json import Fields, read_json
from .rope import RopeConfig, parse_rope

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
class LatentConfig:
    """Multi-head latent attention: what all heads read is one vector per token."""

    rank: int
    """Of the latent vector, `kv_lora_rank`."""
    rope_dim: int
    """Rotated elements, cached behind the latent vector and shared by all heads."""
    nope_dim: int
    """Elements of a head's key that are not rotated; made from the latent vector."""
    value_dim: int
    """Elements of a head's value; made from the latent vector."""


@dataclass(frozen=True)
class IndexerConfig:
    """Sparse attention: an indexer chooses the `topk` tokens that attention looks at."""

    num_heads: int
    head_dim: int
    topk: int


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants of a decoder: pre-norm, rotary embedding, an attention family, SwiGLU.

    With `latent`, attention is computed over the latent vectors themselves: the up-projections are part of the query's
    and the output's. So it is attention of `num_heads` query heads over one cached head of `head_dim` = `latent.rank +
    latent.rope_dim` elements, whose value is its first `latent.rank` elements.
    """

    architecture: str
    """`llama`, `qwen2` or `qwen3`."""
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
    latent: LatentConfig | None = None
    indexer: IndexerConfig | None = None
    """Needs `latent`."""
    sliding_window: int | None = None
    """Tokens that a token looks at, itself included; None for all before it."""
    num_draft_layers: int = 0
    """1 with a layer that guesses the token after the next one (multi-token prediction), cached behind the others."""
    seed: int = 0
    """Of the random weights, where no directory gives any."""
    random_layer_gain: float = 1.0
    """With them, how much a layer adds to its input; with little, a draft layer is often right."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")
        if self.latent is not None and (self.num_kv_heads, self.head_dim) != (1, self.latent.rank + self.rope_dim):
            raise ModelError(
                f"latent attention caches one head of {self.latent.rank + self.rope_dim} elements, "
                f"got {self.num_kv_heads} of {self.head_dim}"
            )
        if self.num_draft_layers not in (0, 1):
            raise ModelError(f"a model has one draft layer or none, got {self.num_draft_layers}")
        if self.indexer is not None and self.latent is None:
            raise ModelError("an indexer needs latent attention: give latent too")
        if self.sliding_window is not None and (self.sliding_window < 1 or self.latent is not None):
            raise ModelError(
                f"a sliding window needs at least 1 token and attention by heads, got {self.sliding_window}"
            )

    @property
    def attention_family(self) -> str:
        """Name in `attention.registry`."""
        if self.indexer is not None:
            return "dsa"
        return "gqa" if self.latent is None else "mla"

    @property
    def rope_dim(self) -> int:
        """Elements of a head that are rotated: its last ones."""
        return self.head_dim if self.latent is None else self.latent.rope_dim

    @property
    def value_dim(self) -> int:
        """Elements of a cached value."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def heads_per_row(self) -> int:
        """Heads of `head_dim` elements in a token's projection: queries, keys, and values unless keys hold them."""
        return self.num_heads + self.num_kv_heads * (2 if self.latent is None else 1)

    def shard(self, size: int) -> ModelConfig:
        """What one of `size` tensor-parallel ranks has: its share of the heads. A latent cache is whole on each.

        Raises `ConfigError` for a number of heads that `size` does not divide.
        """
        if self.latent is not None:
            split = {"num_heads": self.num_heads}
        else:
            split = {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}
        if any(number % size for number in split.values()):
            heads = " and ".join(f"{name} {number}" for name, number in split.items())
            raise ConfigError(f"--tensor-parallel-size {size} must divide the model's {heads}")
        return replace(self, **{name: number // size for name, number in split.items()})  # type: ignore[arg-type]

    @property
    def ranks_cache_alike(self) -> bool:
        """Whether every tensor-parallel rank's cache holds the same bytes, because it has no heads to split."""
        return self.latent is not None

    def cache_backend(self, *, block_size: int, dtype: str) -> AttentionCacheBackend:
        """What its cache looks like, with blocks of `block_size` tokens. Takes no memory; raises `ConfigError`.

        `dtype` is that of the values, or `BLOCK_WISE_FP8`. Sparse attention has a format of its own and ignores it.
        """
        if dtype not in CACHE_DTYPES:
            raise ConfigError(f"unsupported cache dtype {dtype!r}: choose one of {', '.join(CACHE_DTYPES)}")
        if dtype == BLOCK_WISE_FP8 and self.attention_family == "mla":
            raise ConfigError(f"latent attention cannot be cached as {dtype}: choose float32, float16 or bfloat16")
        geometry = CacheGeometry(
            num_layers=self.num_layers + self.num_draft_layers,
            block_size=block_size,
            dtype="uint8" if dtype == BLOCK_WISE_FP8 else dtype,
            scale_dtype="float32" if dtype == BLOCK_WISE_FP8 else None,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            kv_lora_rank=None if self.latent is None else self.latent.rank,
            qk_rope_head_dim=None if self.latent is None else self.latent.rope_dim,
            index_head_dim=None if self.indexer is None else self.indexer.head_dim,
        )
        return make_cache_backend(self.attention_family, geometry)


@dataclass(frozen=True)
class ChecksumConfig:
    """The random model, see `checksum`: a cache of any layout, and no numbers but checksums of it."""

    family: str = "gqa"
    """Name in `attention.registry`."""
    num_layers: int = 4
    num_kv_heads: int = 4
    head_dim: int = 16
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
            kv_lora_rank=128,
            qk_rope_head_dim=16,
            index_head_dim=128,
        )
        return make_cache_backend(self.family, geometry)


RANDOM_MODEL = ModelConfig(
    architecture="llama",
    num_layers=4,
    hidden_size=128,
    intermediate_size=256,
    num_heads=8,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=BYTE_VOCAB_SIZE,
    max_position=32_768,
)


RANDOM_LATENT = LatentConfig(rank=128, rope_dim=16, nope_dim=16, value_dim=16)

RANDOM_MODELS: dict[str, ModelConfig] = {
    "gqa": RANDOM_MODEL,
    "window": replace(RANDOM_MODEL, sliding_window=256),
    "mla": replace(RANDOM_MODEL, num_heads=4, num_kv_heads=1, head_dim=144, latent=RANDOM_LATENT),
    "dsa": replace(
        RANDOM_MODEL,
        num_heads=4,
        num_kv_heads=1,
        head_dim=144,
        latent=RANDOM_LATENT,
        indexer=IndexerConfig(num_heads=2, head_dim=128, topk=64),
    ),
}
"""By what `serve --model-family` calls them."""


def random_model(family: str | None = None, *, mtp: bool = False) -> ModelConfig:
    """With a draft layer if `mtp`. Raises `ModelError` for an unknown family."""
    if family is not None and family not in RANDOM_MODELS:
        raise ModelError(f"unknown --model-family {family!r}: choose one of {', '.join(RANDOM_MODELS)}")
    return replace(RANDOM_MODELS[family or "gqa"], num_draft_layers=int(mtp), random_layer_gain=0.3 if mtp else 1.0)


def load_model_config(path: Path | None, family: str | None = None, *, mtp: bool = False) -> ModelConfig:
    """Of the model in directory `path`; None is a small random model over bytes, see `random_model`.

    Raises `ModelError`, one line, when the directory has no usable `config.json` or it asks for what is not supported.
    """
    if path is None:
        return random_model(family, mtp=mtp)
    if mtp:
        raise ModelError(f"--mtp is for --model random: the draft layer of {path} cannot be read")
    if family is not None:
        raise ModelError(f"--model-family {family} is for --model random: {path} has a family of its own")
    if not path.is_dir():
        raise ModelError(f"model directory {path} does not exist")
    config_file = path / "config.json"
    config = Fields(str(config_file), read_json(config_file))
    architecture = _architecture(config)
    _refuse_unsupported(config)
    num_heads = config.integer("num_attention_heads")
    hidden_size = config.integer("hidden_size")
    bias = config.flag("attention_bias", False)
    return ModelConfig(
        architecture=architecture,
        num_layers=config.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=config.integer("num_key_value_heads", num_heads),
        head_dim=config.integer("head_dim", 128 if architecture == "qwen3" else max(1, hidden_size // num_heads)),
        vocab_size=config.integer("vocab_size"),
        max_position=config.integer("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=parse_rope(config),
        tie_word_embeddings=config.flag("tie_word_embeddings", False),
        qkv_bias=architecture == "qwen2" or bias,
        output_bias=architecture != "qwen2" and bias,
        qk_norm=architecture == "qwen3",
    )


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
