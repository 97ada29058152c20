"""A Llama of two layers with byte-level tokens, in a GGUF file as SmolLM2's."""

from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, quantize
from tokenizers import pre_tokenizers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "42"]
QUANTIZED = GGMLQuantizationType.Q4_1
"""Of the token embedding; the rest is float32."""

COUNTS = {
    "llama.block_count": 2,
    "llama.context_length": 256,
    "llama.embedding_length": 32,
    "llama.feed_forward_length": 24,
    "llama.attention.head_count": 8,
    "llama.attention.head_count_kv": 4,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
    "tokenizer.ggml.padding_token_id": 2,
}
IN_LAYER = {
    **{"attn_norm": (32,), "ffn_norm": (32,), "attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32)},
    **{"attn_output": (32, 32), "ffn_gate": (24, 32), "ffn_up": (24, 32), "ffn_down": (32, 24)},
}


def little_tensors():
    """By their names in GGUF, before they are quantized."""
    random = np.random.default_rng(7)
    shapes = {"token_embd.weight": (len(TOKENS), 32), "output_norm.weight": (32,)}
    for layer in range(2):
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in IN_LAYER.items()}
    return {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path: Path, tensors=None) -> Path:
    writer = GGUFWriter(path, "llama")
    for name, count in COUNTS.items():
        writer.add_uint32(name, count)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("llama.rope.freq_base", 10000.0)
    writer.add_array("tokenizer.ggml.tokens", TOKENS)
    writer.add_array("tokenizer.ggml.token_type", [3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_array("tokenizer.ggml.merges", ["h e", "l l", "he ll", "4 2"])
    writer.add_string(
        "tokenizer.chat_template",
        "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}",
    )
    for name, tensor in (tensors or little_tensors()).items():
        if name == "token_embd.weight":
            writer.add_tensor(name, quantize(tensor, QUANTIZED), raw_dtype=QUANTIZED)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
