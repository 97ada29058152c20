"""The checks of Paddle's flash functions find what is wrong with FAKE ones, in NumPy."""

import importlib
import sys
from functools import partial

import paddle
import pytest
from paddle.nn.functional import flash_attention as functions

from tests.flash_attention import flash


def second(q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, scale, causal, training, *, made):
    assert not training
    return made(q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, causal=causal, softmax_scale=scale)


def third(q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, causal, softmax_scale=1.0, *, made):
    return made(q, k, v, cu_q, cu_k, max_seqlen_q, max_seqlen_k, causal=causal, softmax_scale=softmax_scale)


def of_another_base(*given, **options):
    out, lse = flash(*given, **options)
    return out, lse / 0.6931


FORGETS = partial(flash, forgets_prefix=True)
FAKES = {
    # what the function of each version does, on a GPU of which capability, and which check fails
    "as known": (FORGETS, flash, (9, 0), None),
    "both see it": (flash, flash, (9, 0), None),
    "another answer": (lambda *given, **options: (given[2] * 0 + 7, None), flash, (9, 0), "flash_attention_2_gives"),
    "a third that forgets": (FORGETS, FORGETS, (9, 0), "flash_attention_3_sees"),
    "another sum": (FORGETS, of_another_base, (9, 0), "pieces_of_a_prefix"),
    "no third": (FORGETS, None, (8, 0), None),
}


@pytest.mark.parametrize("case", FAKES)
def test_which_check_fails(monkeypatch, case):
    two, three, capability, failing = FAKES[case]
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(functions, "flash_attn_unpadded", partial(second, made=two))
    monkeypatch.setattr(functions, "flash_attention_v3_varlen", partial(third, made=three), raising=False)
    monkeypatch.delitem(sys.modules, "tests.gpu.flash_checks", raising=False)
    checks = importlib.import_module("tests.gpu.flash_checks").CHECKS
    assert len(checks) == (1 if three is None else 3)
    for name, check in checks.items():
        if failing is not None and name.startswith(failing):
            with pytest.raises(AssertionError, match=r"means of the values seen|they differ by"):
                check()
            return
        check()
    assert failing is None
