"""Writes GGUF files for tests, from the format's definition; and a little model in one."""

import struct

import numpy as np

TEXT = "tokenizer.ggml"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message.content }}<|im_end|>{% endfor %}"


def gguf_bytes(metadata, tensors, version=3):
    """`tensors`: name -> (shape, outermost dimension first; type number; bytes)."""
    alignment = metadata.get("general.alignment", 32)
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    head += b"".join(_string(key) + _typed(value) for key, value in metadata.items())
    data = b""
    for name, (shape, kind, content) in tensors.items():
        data += bytes(-len(data) % alignment)
        sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += _string(name) + sizes + struct.pack("<IQ", kind, len(data))
        data += content
    return head + bytes(-len(head) % alignment) + data


def _string(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _typed(value):
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    items = [_typed(item) for item in value]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(items)) + b"".join(item[4:] for item in items)


def little_llama():
    """Metadata and tensors (float32 arrays, by GGUF's names) of two layers, hidden size 16, byte-level tokens."""
    from tokenizers import pre_tokenizers

    signs = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL, *signs, "he", "ll", "hell", "42"]
    metadata = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 256,
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 24,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        f"{TEXT}.tokens": tokens,
        f"{TEXT}.token_type": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        f"{TEXT}.merges": ["h e", "l l", "he ll", "4 2"],
        f"{TEXT}.bos_token_id": 1,
        f"{TEXT}.eos_token_id": 2,
        f"{TEXT}.unknown_token_id": 0,
        f"{TEXT}.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }
    random = np.random.default_rng(7)
    shapes = {"token_embd.weight": (len(tokens), 16), "output_norm.weight": (16,)}
    for layer in range(2):
        block = {
            **{"attn_norm": (16,), "ffn_norm": (16,), "attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16)},
            **{"attn_output": (16, 16), "ffn_gate": (24, 16), "ffn_up": (24, 16), "ffn_down": (16, 24)},
        }
        shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in block.items()}
    return metadata, {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def little_gguf():
    metadata, tensors = little_llama()
    return gguf_bytes(metadata, {name: (array.shape, 0, array.tobytes()) for name, array in tensors.items()})
