"""Latent attention (MLA) over a cached prefix, for releases whose prefill ignores the prefix.

The supported releases compute a prompt with the keys of the pass alone: `MLAAttentionBackend` writes the new latent
vectors to the cache and calls a flash function with only these. The cached tokens of the prompt, from a prefix or from
earlier chunks, are left out, and the output is wrong (docs/operate/fastdeploy.md).

The mend calls the same flash function again with the cached tokens as keys, at most `piece` at a time. These are
gathered from the layer's cache, projected up by its `kv_b_proj`, and not masked, since they precede all new tokens. The
parts are joined by their log-sum-exp in float32, which equals the softmax over all keys (Milakov and Gimelshein,
"Online normalizer calculation for softmax", 2018). A pass without such a prompt runs as before. The price is one
synchronisation per pass, and memory for one piece, which the profiling run includes.

Only for the thread that runs the model.
"""

from __future__ import annotations

import sys
from typing import Any

from ...errors import ConfigError
from .. import Args, Kwargs, Wrapped

PREFIX = "_kvcache_v1_prefix"
"""Attribute of a `ForwardMeta`: the `PassPrefix` that its layers read, or None."""

LATENT = "_kvcache_v1_latent"
"""Attribute of an `Attention` layer: its `DeepseekV3MLAAttention`."""


class PassPrefix:
    """The cached tokens of the prompts of one pass. All layers share it and read it one after the other."""

    def __init__(self, places: Any, starts: Any, row_of_token: Any, caches: Any) -> None:
        """`places`: [cached tokens, 3] int32, the place of each in a layer's cache: block, head 0, offset; row by row.
        `starts`: [rows + 1] int32, the first cached token of each row in `places`. `row_of_token`: [new tokens] int32.
        `caches`: one tensor [blocks, 1, block size, latent and rotary values] per layer.
        """
        self.places, self.starts, self.row_of_token = places, starts, row_of_token
        self._caches = caches
        self.layer: Any = None
        """The running `Attention` layer, whose swap-in has been waited for."""

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
    """Replaces a backend's flash function: the result is that of all keys, the cached prefix included."""

    def __init__(self, attend: Wrapped, piece: int) -> None:
        """`attend` returns the output [new tokens, heads, width] and its log-sum-exp [heads, new tokens], float32."""
        self._attend = attend
        self.piece = piece
        self.prefix: PassPrefix | None = None

    def __call__(
        self, q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, max_q: Any, max_k: Any, *, causal: bool, **options: Any
    ) -> tuple[Any, Any]:
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
    """Attention over several parts of the keys."""

    def __init__(self, out: Any, lse: Any) -> None:
        heads, tokens = out.shape[1], out.shape[0]
        if list(lse.shape) != [heads, tokens]:
            raise RuntimeError(
                f"got a log-sum-exp of shape {list(lse.shape)} from the flash function, expected [{heads} heads, "
                f"{tokens} tokens]: install the Paddle of a supported FastDeploy, or unset ENABLE_V1_KVCACHE_MANAGER"
            )
        self.out, self.lse = out.cast("float32"), lse.cast("float32")

    def add(self, out: Any, lse: Any, has_keys: Any) -> None:
        """`has_keys`: tokens with keys in this part. The kernel may return anything for the others."""
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
    """[heads, tokens] -> [tokens, heads, 1]."""
    return weights.transpose([1, 0]).unsqueeze(-1)


# ---- once per pass


def _has_prefix(meta: Any) -> bool:
    """False: no prompt of this pass has cached tokens, by FastDeploy's lengths on the host. Does not wait."""
    longest_prompt, longest_cached = int(meta.max_len_tensor_cpu[1]), int(meta.max_len_tensor_cpu[2])
    return longest_prompt > 0 and longest_cached > 0


def find_prefix(meta: Any, block_size: int) -> PassPrefix | None:
    """The cached tokens of the pass's prompts, or None. Waits once for the device if there may be any."""
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
    """A whole piece in the first row, so that the profiling run includes its memory."""
    import paddle

    token = paddle.arange(tokens, dtype="int32")
    zero = paddle.zeros_like(token)
    places = paddle.stack([zero, zero, token % block_size], axis=-1)
    rows = meta.seq_lens_this_time.reshape([-1]).shape[0]
    starts = paddle.concat([paddle.zeros([1], dtype="int32"), paddle.full([rows], tokens, dtype="int32")])
    return PassPrefix(places, starts, _row_of_token(meta), meta.caches)


def _row_of_token(meta: Any) -> Any:
    """[new tokens] int32: the row of each."""
    import paddle

    ends = meta.cu_seqlens_q.reshape([-1])[1:].cast("int32")
    token = paddle.arange(meta.ids_remove_padding.shape[0], dtype="int32")
    return paddle.searchsorted(ends, token, right=True, out_int32=True).clip(max=ends.shape[0] - 1)


# ---- wraps


def init_backend(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `MLAAttentionBackend.__init__`. Raises `ConfigError` if its flash function returns no log-sum-exp."""
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
    """Wraps `DeepseekV3MLAAttention.__init__`: its attention layer gets a reference to it. `object.__setattr__`,
    because Paddle would load and save a registered sublayer twice.
    """
    wrapped(*args, **kwargs)
    object.__setattr__(instance.mla_attn, LATENT, instance)


def positions(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> tuple[Any, Any]:
    """Wraps `DeepseekV3ForCausalLM.pre_process` of 2.5: positions [new tokens] int32, and [new tokens, 1] int32, 1 for
    tokens of prompts.

    The operator of 2.5 numbers a prompt with a prefix from 0, and writes later rows to wrong places, even behind the
    end of its buffers. So a pass with a prefix does not call it.
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
