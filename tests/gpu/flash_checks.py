"""What FastDeploy's FLASH_ATTN and MLA_ATTN rest on in Paddle's flash functions. Needs a Paddle that sees a GPU."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import paddle
from paddle.nn.functional import flash_attention as functions

from fastdeploy_kvcache_v1.fastdeploy_integration.worker.causal_mask import EXPECTED, means_seen
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.latent_prefix import PassPrefix, PrefixAttention

if not paddle.device.cuda.device_count():
    raise ImportError(f"Paddle {paddle.__version__} sees no GPU")

FORGETTING = [0.0, 0.5]
"""Means of the values 0, and of 0 and 1: as if there were no prefix."""

HEADS, WIDTH, PIECE = 2, 192, 40
CACHED, NEW = (70, 0, 5), (3, 4, 2)
"""Tokens of three rows. Pieces cut the first one's, and nothing of the second one is cached."""


def second(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *, head_dim: int, **given: Any) -> Any:
    """FlashAttention 2, as FastDeploy calls it."""
    lengths = {name: given[name] for name in ("max_seqlen_q", "max_seqlen_k", "causal")}
    return functions.flash_attn_unpadded(q, k, v, cu_q, cu_k, **lengths, scale=head_dim**-0.5, training=False)


def third(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, **given: Any) -> Any:
    """FlashAttention 3, likewise."""
    lengths = {name: given[name] for name in ("max_seqlen_q", "max_seqlen_k", "causal")}
    return functions.flash_attention_v3_varlen(q, k, v, cu_q, cu_k, **lengths)


def is_near(found: list[float], expected: list[float]) -> bool:
    return all(abs(one - other) < 0.05 for one, other in zip(found, expected, strict=True))


def flash_attention_2_gives_an_answer_that_a_worker_knows() -> None:
    """A worker refuses FLASH_ATTN if it forgets. FastDeploy uses it where the compute capability is not 9.0."""
    found = means_seen(second)
    assert is_near(found, EXPECTED) or is_near(found, FORGETTING), f"means of the values seen: {found}"
    print(f"FlashAttention 2 {'sees' if is_near(found, EXPECTED) else 'forgets'} a cached prefix")


def flash_attention_3_sees_the_whole_prefix() -> None:
    found = means_seen(third)
    assert is_near(found, EXPECTED), f"means of the values seen: {found}"


class Prefix(PassPrefix):
    """Keys and values that need no latent cache."""

    def __init__(self, keys: Any, values: Any) -> None:
        rows = [row for row, length in enumerate(NEW) for _ in range(length)]
        super().__init__(keys, starts_of(CACHED), paddle.to_tensor(rows, dtype="int32"), None)
        self._given = keys, values

    def expand(self, begin: int, end: int, value_width: int) -> tuple[Any, Any]:
        keys, values = self._given
        return keys[begin:end], values[begin:end]


def starts_of(lengths: tuple[int, ...]) -> Any:
    return paddle.to_tensor([0, *accumulate(lengths)], dtype="int32")


def row_by_row(cached: Any, new: Any) -> Any:
    """Of each row what is cached, then what is new."""
    pairs = zip(cached.split(list(CACHED)), new.split(list(NEW)), strict=True)
    return paddle.concat([part for pair in pairs for part in pair])


def pieces_of_a_prefix_joined_by_log_sum_exp_are_the_whole() -> None:
    """What MLA_ATTN does with a cached prefix, over FlashAttention 3."""
    paddle.seed(0)
    attend, options = functions.flash_attention_v3_varlen, {"causal": True, "softmax_scale": WIDTH**-0.5}
    q, *new = (paddle.randn([sum(NEW), HEADS, WIDTH]).cast("bfloat16") for _ in range(3))
    cached = [paddle.randn([sum(CACHED), HEADS, WIDTH]).cast("bfloat16") for _ in range(2)]
    both = [before + now for before, now in zip(CACHED, NEW, strict=True)]
    starts = starts_of(NEW)
    whole = attend(q, *map(row_by_row, cached, new), starts, starts_of(tuple(both)), max(NEW), max(both), **options)[0]
    attention = PrefixAttention(attend, PIECE)
    attention.prefix = Prefix(*cached)
    found = attention(q, *new, starts, starts, max(NEW), max(NEW), **options)[0]
    most = float((found.cast("float32") - whole.cast("float32")).abs().max())
    assert most < 0.02, f"they differ by {most}"


def checks() -> dict[str, Callable[[], None]]:
    """By title: those that this GPU can run."""
    found = [flash_attention_2_gives_an_answer_that_a_worker_knows]
    if tuple(paddle.device.cuda.get_device_capability()) == (9, 0):
        found += [flash_attention_3_sees_the_whole_prefix, pieces_of_a_prefix_joined_by_log_sum_exp_are_the_whole]
    else:
        print("left out: FlashAttention 3: it needs compute capability 9.0")
    return {check.__name__: check for check in found}


CHECKS = checks()
