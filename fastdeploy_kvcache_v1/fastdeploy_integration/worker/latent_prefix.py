"""Prompts of latent attention (MLA) behind a cached prefix, or in chunks, in releases whose prefill forgets the prefix.

The supported releases compute a prompt with the keys of the pass alone: `MLAAttentionBackend` writes the new latent
vectors to the cache and calls a flash function with what it has just computed. What the prompt has in the cache, from a
prefix or from its earlier chunks, is left out, and the tokens are wrong (docs/operate/fastdeploy.md).

The mend calls the same flash function again, with the cached tokens as keys: at most `piece` of them at a time,
gathered from the layer's cache, projected up by the layer's own `kv_b_proj`, and without a mask, since they all come
before the new ones. Results are joined by their log-sum-exp in float32, which is the softmax over all keys (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018). No body of FastDeploy's is replaced; a pass that has no
such prompt runs as before. It costs one synchronisation in a pass, and memory for one piece, which the profiling run
has seen.

Only in the thread that runs the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from ...errors import ConfigError

Wrapped = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

PREFIX = "_kvcache_v1_prefix"
"""Attribute of a `ForwardMeta`: the `PassPrefix` that its layers read, or None."""

LATENT = "_kvcache_v1_latent"
"""Attribute of an `Attention` layer: the `DeepseekV3MLAAttention` that has it."""


class PassPrefix:
    """What the prompts of one pass have in the cache. The same for all layers, which read it one after the other."""

    def __init__(self, places: Any, starts: Any, row_of_token: Any, caches: Any) -> None:
        """`places`: [cached tokens, 3], where each is in a layer's cache, as block, head 0, offset; row by row.
        `starts`: [rows + 1] int32, where the cached tokens of a row begin among them. `row_of_token`: [new tokens].
        `caches`: one tensor [blocks, 1, block size, latent and rotary values] per layer.
        """
        self.places, self.starts, self.row_of_token = places, starts, row_of_token
        self._caches = caches
        self.layer: Any = None
        """The `Attention` layer that runs; it has been waited for."""

    def __len__(self) -> int:
        return int(self.places.shape[0])

    def expand(self, begin: int, end: int, value_width: int) -> tuple[Any, Any]:
        """Keys and values of cached tokens `[begin, end)` of this layer: [end - begin, heads, width]."""
        import paddle

        model = getattr(self.layer, LATENT)
        latent = paddle.gather_nd(self._caches[self.layer.layer_id], self.places[begin:end])
        nope, rank = model.qk_nope_head_dim, model.kv_lora_rank
        up = model.kv_b_proj(latent[:, :rank].contiguous())
        up = up.reshape([end - begin, model.num_attention_heads_tp, nope + model.v_head_dim])
        rotary = latent[:, rank:].unsqueeze(1).expand([-1, model.num_attention_heads_tp, -1])
        key = paddle.concat([up[..., :nope], rotary], axis=-1)
        value = paddle.nn.functional.pad(up[..., nope:], [0, value_width - model.v_head_dim])
        return key, value


class PrefixAttention:
    """In place of a backend's flash function: the same result, as if the prefix were among the keys of the pass."""

    def __init__(self, attend: Wrapped, piece: int) -> None:
        """`attend` returns the output [new tokens, heads, width] and its log-sum-exp [heads, new tokens], float32."""
        self._attend = attend
        self.piece = piece
        self.prefix: PassPrefix | None = None

    def __call__(
        self, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, *, causal: bool, **options: Any
    ) -> tuple[Any, Any]:
        """As `attend`: the output, and its log-sum-exp."""
        out, lse = self._attend(q, k, v, cu_q, cu_k, max_q, max_k, causal=causal, **options)[:2]
        prefix = self.prefix
        if prefix is None:
            return out, lse
        joined = _Joined(out, lse)
        for begin in range(0, len(prefix), self.piece):
            end = min(begin + self.piece, len(prefix))
            key, value = prefix.expand(begin, end, v.shape[-1])
            starts = prefix.starts.clip(begin, end) - begin
            part = self._attend(q, key, value, cu_q, starts, max_q, end - begin, causal=False, **options)
            has_keys = (starts[1:] > starts[:-1]).gather(prefix.row_of_token)
            joined.add(part[0], part[1], has_keys)
        return joined.out.cast(out.dtype), joined.lse


class _Joined:
    """Attention over keys that came in several parts."""

    def __init__(self, out: Any, lse: Any) -> None:
        heads, tokens = out.shape[1], out.shape[0]
        if list(lse.shape) != [heads, tokens]:
            raise RuntimeError(
                f"the flash function returned a log-sum-exp of shape {list(lse.shape)}, not [{heads} heads, {tokens} "
                "tokens]: this Paddle cannot serve MLA_ATTN with ENABLE_V1_KVCACHE_MANAGER=1"
            )
        self.out, self.lse = out.cast("float32"), lse.cast("float32")

    def add(self, out: Any, lse: Any, has_keys: Any) -> None:
        """`has_keys`: of which tokens there are keys in this part; the kernel may return anything for the others."""
        import paddle

        nothing = paddle.full_like(self.lse, -float("inf"))
        lse = paddle.where(has_keys.unsqueeze(0), lse.cast("float32"), nothing)
        out = paddle.where(has_keys.reshape([-1, 1, 1]), out.cast("float32"), paddle.zeros_like(self.out))
        most = paddle.maximum(self.lse, lse)
        old, new = paddle.exp(self.lse - most), paddle.exp(lse - most)
        total = old + new
        self.out = self.out * _per_head(old / total) + out * _per_head(new / total)
        self.lse = most + paddle.log(total)


def _per_head(weights: Any) -> Any:
    """[heads, tokens] as a factor of [tokens, heads, width]."""
    return weights.transpose([1, 0]).unsqueeze(-1)


# ---- once per pass


def _has_prefix(meta: Any) -> bool:
    """Can a prompt of this pass have tokens in the cache? By FastDeploy's lengths on the host, without waiting."""
    longest_prompt, longest_cached = int(meta.max_len_tensor_cpu[1]), int(meta.max_len_tensor_cpu[2])
    return longest_prompt > 0 and longest_cached > 0


def find_prefix(meta: Any, block_size: int) -> PassPrefix | None:
    """What the prompts of the pass have in the cache; None if nothing."""
    import paddle

    if not _has_prefix(meta):
        return None
    new, cached = meta.seq_lens_this_time.reshape([-1]), meta.seq_lens_decoder.reshape([-1])
    is_prompt = (meta.seq_lens_encoder.reshape([-1]) > 0) & (new > 0)
    counts = paddle.where(is_prompt, cached, paddle.zeros_like(cached))
    ends = paddle.cumsum(counts).cast("int32")
    total = int(ends[-1])  # the one wait for the device
    if not total:
        return None
    starts = paddle.concat([paddle.zeros([1], dtype="int32"), ends])
    token = paddle.arange(total, dtype="int32")
    row = paddle.searchsorted(ends, token, right=True, out_int32=True)
    position = token - starts.gather(row)
    block = paddle.gather_nd(meta.block_tables, paddle.stack([row, position // block_size], axis=-1))
    head = paddle.zeros_like(position)
    places = paddle.stack([block.cast("int32"), head, position % block_size], axis=-1)
    return PassPrefix(places, starts, _row_of_token(meta), meta.caches)


def _made_up_prefix(meta: Any, block_size: int, tokens: int) -> PassPrefix:
    """For the profiling run: a whole piece, of the first row, so that its memory is seen."""
    import paddle

    token = paddle.arange(tokens, dtype="int32")
    zero = paddle.zeros_like(token)
    places = paddle.stack([zero, zero, token % block_size], axis=-1)
    rows = meta.seq_lens_this_time.reshape([-1]).shape[0]
    starts = paddle.concat([paddle.zeros([1], dtype="int32"), paddle.full([rows], tokens, dtype="int32")])
    return PassPrefix(places, starts, _row_of_token(meta), meta.caches)


def _row_of_token(meta: Any) -> Any:
    """[new tokens]: the row of each."""
    import paddle

    ends = meta.cu_seqlens_q.reshape([-1])[1:].cast("int32")
    token = paddle.arange(meta.ids_remove_padding.shape[0], dtype="int32")
    return paddle.searchsorted(ends, token, right=True, out_int32=True).clip(max=ends.shape[0] - 1)


# ---- wraps


def init_backend(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `MLAAttentionBackend.__init__`, which chooses the flash function.

    Raises `ConfigError` if that returns no log-sum-exp.
    """
    wrapped(*args, **kwargs)
    config = kwargs["fd_config"] if "fd_config" in kwargs else args[0]
    with_sums = sys.modules[type(instance).__module__].flash_attention_v3_varlen
    if with_sums is None or instance.flash_attn_func is not with_sums:
        raise ConfigError(
            "MLA_ATTN needs FlashAttention 3, whose log-sum-exp joins a prompt with its cached prefix: use a GPU of "
            "compute capability 9.0 with a Paddle built for it, or unset ENABLE_V1_KVCACHE_MANAGER"
        )
    piece = int(config.scheduler_config.max_num_batched_tokens)
    instance.flash_attn_func = PrefixAttention(instance.flash_attn_func, piece)


def init_metadata(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `MLAAttentionBackend.init_attention_metadata`, which begins a pass."""
    wrapped(*args, **kwargs)
    meta = kwargs["forward_meta"] if "forward_meta" in kwargs else args[0]
    attention, block_size = instance.flash_attn_func, instance.block_size
    if not meta.is_dummy_or_profile_run:
        attention.prefix = find_prefix(meta, block_size)
    elif int(meta.max_len_tensor_cpu[1]) > 0:
        attention.prefix = _made_up_prefix(meta, block_size, attention.piece)
    else:
        attention.prefix = None
    setattr(meta, PREFIX, attention.prefix)


def init_latent_attention(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `DeepseekV3MLAAttention.__init__`: its attention layer knows it, but not as a sublayer, which would be
    loaded and saved twice.
    """
    wrapped(*args, **kwargs)
    object.__setattr__(instance.mla_attn, LATENT, instance)


def positions(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    """Wraps `DeepseekV3ForCausalLM.pre_process` of 2.5: positions [new tokens], and [new tokens, 1], 1 where a token is
    of a prompt.

    Its operator counts a prompt behind a prefix from 0, and moves all rows behind it to other tokens' places, even
    behind the end of its buffers: it is not called where there is one.
    """
    import paddle

    meta = kwargs["forward_meta"] if "forward_meta" in kwargs else args[0]
    if not _has_prefix(meta):
        result: tuple[Any, Any] = wrapped(*args, **kwargs)
        return result
    row = _row_of_token(meta)
    offset = paddle.arange(row.shape[0], dtype="int32") - meta.cu_seqlens_q.reshape([-1]).cast("int32").gather(row)
    position = meta.seq_lens_decoder.reshape([-1]).cast("int32").gather(row) + offset
    is_prompt = meta.seq_lens_encoder.reshape([-1]).gather(row) > 0
    return position, is_prompt.cast("int32").reshape([-1, 1])
