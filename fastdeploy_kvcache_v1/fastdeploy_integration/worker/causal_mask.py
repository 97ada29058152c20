"""Check at a worker's start that the flash function of this GPU sees the cached prefix of a prompt.

A prompt with a cached prefix has more keys than queries, and its last query must see all keys: the causal mask ends at
the bottom right. FlashAttention 3 does that. Paddle's FlashAttention 2, which FLASH_ATTN calls on GPUs whose compute
capability is not 9.0, lets query i see keys 0 to i, as if there were no prefix.
"""

from __future__ import annotations

import sys
from typing import Any

from ...errors import ConfigError
from .. import Wrapped

NUM_QUERIES, NUM_KEYS, HEAD_DIM = 2, 4, 64
EXPECTED = [1.0, 1.5]
"""Means of the values 0, 1, 2 and of 0, 1, 2, 3: all keys are alike."""


def init_flash_backend(wrapped: Wrapped, instance: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Wraps `FlashAttentionBackend.__init__`. Raises `ConfigError` if its function does not see the prefix."""
    wrapped(*args, **kwargs)
    module = sys.modules[type(instance).__module__]
    if module.FLASH_ATTN_VERSION == 4:
        return  # it gets its mask from FastDeploy
    found = means_seen(module.flash_attn_func)
    if any(abs(mean - expected) > 0.05 for mean, expected in zip(found, EXPECTED, strict=True)):
        raise ConfigError(
            f"FLASH_ATTN on this GPU (FlashAttention {module.FLASH_ATTN_VERSION}) ignores the cached prefix of a "
            "prompt, so cache hits and chunked prompts would give wrong tokens: set FD_ATTENTION_BACKEND=APPEND_ATTN"
        )


def means_seen(flash: Wrapped) -> list[float]:
    """For each query of a prompt with a prefix of two tokens: the mean of the values that it sees."""
    import paddle

    def tensor(values: list[list[float]], dtype: str) -> Any:
        return paddle.to_tensor(values, dtype="float32").cast(dtype).unsqueeze(1)

    queries = tensor([[0.0] * HEAD_DIM] * NUM_QUERIES, "bfloat16")
    keys = tensor([[0.0] * HEAD_DIM] * NUM_KEYS, "bfloat16")
    values = tensor([[float(key)] * HEAD_DIM for key in range(NUM_KEYS)], "bfloat16")
    out = flash(
        queries,
        keys,
        values,
        paddle.to_tensor([0, NUM_QUERIES], dtype="int32"),
        paddle.to_tensor([0, NUM_KEYS], dtype="int32"),
        max_seqlen_q=NUM_QUERIES,
        max_seqlen_k=NUM_KEYS,
        causal=True,
        num_heads=1,
        kv_num_heads=1,
        head_dim=HEAD_DIM,
    )[0]
    return [float(mean) for mean in out.cast("float32").reshape([NUM_QUERIES, -1]).mean(axis=-1)]
