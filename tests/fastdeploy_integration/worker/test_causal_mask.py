"""A worker asks the flash function of its GPU whether it sees a cached prefix. Flash functions are NumPy here."""

import sys
from contextlib import nullcontext
from types import ModuleType

import numpy as np
import paddle
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.causal_mask import init_flash_backend


def flash(corner):
    """Its mask ends at that corner."""

    def attend(q, k, v, cu_q, cu_k, *, causal, head_dim, **lengths):
        num_q, num_k = q.shape[0], k.shape[0]
        assert (cu_q.tolist(), cu_k.tolist(), causal) == ([0, num_q], [0, num_k], True)
        assert q.shape == [num_q, lengths["num_heads"], head_dim]
        last = np.arange(num_q) + (num_k - num_q if corner == "bottom right" else 0)
        seen = np.arange(num_k) <= last[:, None]
        values = v.cast("float32").numpy()
        means = np.einsum("qk,khd->qhd", seen / seen.sum(-1, keepdims=True), values)
        return paddle.to_tensor(means.astype("float32")).cast("bfloat16"), None

    return attend


@pytest.mark.parametrize(
    ("version", "corner", "refused"),
    [(2, "top left", True), (2, "bottom right", False), (3, "bottom right", False), (4, "top left", False)],
)
def test_a_flash_function_that_forgets_the_prefix_is_refused(monkeypatch, version, corner, refused):
    module = ModuleType("flash_backend_of_the_test")
    module.FLASH_ATTN_VERSION, module.flash_attn_func = version, flash(corner)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    backend = type("FlashAttentionBackend", (), {"__module__": module.__name__})()
    made = []
    refusal = pytest.raises(ConfigError, match=r"FlashAttention 2.*FD_ATTENTION_BACKEND=APPEND_ATTN")
    with refusal if refused else nullcontext():
        init_flash_backend(lambda *args, **named: made.append((args, named)), backend, ("config",), {"head_dim": 64})
    assert made == [(("config",), {"head_dim": 64})]
