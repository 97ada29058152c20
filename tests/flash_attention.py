"""A FAKE flash function in NumPy and float32, by the rules of FlashAttention 3, or of Paddle's FlashAttention 2."""

import numpy as np
import paddle


def flash(q, k, v, cu_q, cu_k, max_q, max_k, *, causal, softmax_scale, forgets_prefix=False):
    """Output [tokens, heads, width] and log-sum-exp [heads, tokens] of rows that begin at `cu_q` and `cu_k`. The causal
    mask ends at the bottom right, or with `forgets_prefix` begins at the top left. What it returns where there are no
    keys is not defined: NaN.
    """
    queries, keys, values = (each.cast("float32").numpy() for each in (q, k, v))
    starts_q, starts_k = cu_q.numpy().ravel(), cu_k.numpy().ravel()
    assert (len(queries), len(keys), len(values)) == (starts_q[-1], starts_k[-1], starts_k[-1])
    out, lse = np.full(q.shape, np.nan, "float32"), np.full((q.shape[1], q.shape[0]), np.nan, "float32")
    for row in range(len(starts_q) - 1):
        here, there = slice(*starts_q[row : row + 2]), slice(*starts_k[row : row + 2])
        num_q, num_k = here.stop - here.start, there.stop - there.start
        if not num_q or not num_k:
            continue
        assert causal or num_k <= int(max_k)
        scores = np.einsum("qhd,khd->hqk", queries[here], keys[there]) * softmax_scale
        if causal:
            last = np.arange(num_q)[:, None] + (0 if forgets_prefix else num_k - num_q)
            scores = np.where(np.arange(num_k) <= last, scores, -np.inf)
        lse[:, here] = np.log(np.exp(scores).sum(-1))
        out[here] = np.einsum("hqk,khd->qhd", softmax(scores), values[there])
    return paddle.to_tensor(out).cast(q.dtype), paddle.to_tensor(lse)


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)
