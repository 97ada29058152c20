"""A worker asks the flash function of its GPU whether it sees a cached prefix. Flash functions are NumPy here."""

import sys
from contextlib import nullcontext
from types import ModuleType

import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.causal_mask import init_flash_backend
from tests.flash_attention import flash


@pytest.mark.parametrize(
    ("version", "forgets_prefix", "refused"), [(2, True, True), (2, False, False), (3, False, False), (4, True, False)]
)
def test_a_flash_function_that_forgets_the_prefix_is_refused(monkeypatch, version, forgets_prefix, refused):
    def attend(q, k, v, cu_q, cu_k, *, max_seqlen_q, max_seqlen_k, causal, num_heads, kv_num_heads, head_dim):
        assert (q.shape[1:], k.shape[1:], causal) == ([num_heads, head_dim], [kv_num_heads, head_dim], True)
        lengths, options = (max_seqlen_q, max_seqlen_k), {"softmax_scale": 1.0, "forgets_prefix": forgets_prefix}
        return flash(q, k, v, cu_q, cu_k, *lengths, causal=causal, **options)

    module = ModuleType("flash_backend_of_the_test")
    module.FLASH_ATTN_VERSION, module.flash_attn_func = version, attend
    monkeypatch.setitem(sys.modules, module.__name__, module)
    backend = type("FlashAttentionBackend", (), {"__module__": module.__name__})()
    made = []
    refusal = pytest.raises(ConfigError, match=r"FlashAttention 2.*FD_ATTENTION_BACKEND=APPEND_ATTN")
    with refusal if refused else nullcontext():
        init_flash_backend(lambda *args, **named: made.append((args, named)), backend, ("config",), {"head_dim": 64})
    assert made == [(("config",), {"head_dim": 64})]
