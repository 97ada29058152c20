"""What a decoder model looks like, read from a Hugging Face `config.json`. Pure Python: no paddle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..attention.base import AttentionCacheBackend
from ..attention.geometry import CacheGeometry
from ..attention.registry import make_cache_backend
from ..errors import ModelError
from .hf_json import Fields, read_json
from .rope import RopeConfig, parse_rope

BYTE_VOCAB_SIZE = 264
"""256 bytes and the eight special tokens of `tokenizer.ByteTokenizer`."""

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and variants of a decoder: pre-norm, rotary embedding, grouped-query attention, SwiGLU."""

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
    attention_family: str = "gqa"
    """Name in `attention.registry`."""
    seed: int = 0
    """Of the random weights, where no directory gives any."""

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads")
        if self.head_dim % 2:
            raise ModelError(f"head_dim must be even for the rotary embedding, got {self.head_dim}")

    def cache_backend(self, *, block_size: int, dtype: str) -> AttentionCacheBackend:
        """What its cache looks like, with blocks of `block_size` tokens. Takes no memory; raises `ConfigError`."""
        geometry = CacheGeometry(
            num_layers=self.num_layers,
            block_size=block_size,
            dtype=dtype,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
        )
        return make_cache_backend(self.attention_family, geometry)


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


def load_model_config(path: Path | None) -> ModelConfig:
    """Of the model in directory `path`; None is the small random model over bytes.

    Raises `ModelError`, one line, when the directory has no usable `config.json` or it asks for what is not supported.
    """
    if path is None:
        return RANDOM_MODEL
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
