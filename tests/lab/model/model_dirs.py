"""Writes small random model directories in Hugging Face's format."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 1,
}


def tensor_shapes(config: dict) -> dict[str, tuple[int, ...]]:
    """Names and shapes that a checkpoint of `config` has."""
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    kind = config["architectures"][0]
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (q, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, q),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if kind.startswith("Qwen2"):
        layer |= {f"self_attn.{p}_proj.bias": (size,) for p, size in (("q", q), ("k", kv), ("v", kv))}
    if kind.startswith("Qwen3"):
        layer |= {"self_attn.q_norm.weight": (dim,), "self_attn.k_norm.weight": (dim,)}
    shapes = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, hidden)
    layers = range(config["num_hidden_layers"])
    return shapes | {f"model.layers.{i}.{name}": shape for i in layers for name, shape in layer.items()}


def random_tensors(config: dict, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in tensor_shapes(config).items():
        scale = 1.0 if "embed" in name else 1.5 * shape[-1] ** -0.5
        values = rng.standard_normal(shape) * scale
        tensors[name] = (1 + 0.3 * values if "norm" in name else values).astype(np.float32)
    return tensors


def write_model(path: Path, tensors: dict[str, np.ndarray], config: dict) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if tensors:
        save_file(tensors, path / "model.safetensors")
    return path


def byte_level_tokenizer() -> Tokenizer:
    """Byte-level BPE as Qwen and Llama 3 have it, with a few merges that cut through characters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<|bos|>": 0, "<|eos|>": 1} | {char: index for index, char in enumerate(alphabet, start=2)}
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "a"), ("Ã", "©"), ("ð", "Ł"), ("ä", "½"), ("Ł", "ĺ")]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>"])
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """Llama 2's kind: words with a leading space marker, single bytes for everything else."""
    words = ["<s>", "</s>", "▁", "▁hello", "▁a", "b", "é", "你", "▁▁", "\ufffd"]
    vocab = {word: index for index, word in enumerate(words)}
    vocab |= {f"<0x{byte:02X}>": len(words) + byte for byte in range(256)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token=None))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer
