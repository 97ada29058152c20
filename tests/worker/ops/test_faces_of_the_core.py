"""What is asked of the compiled core and what is made of its answers, where only a GPU could do the rest."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, InvariantError, TransferError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import library
from fastdeploy_kvcache_v1.worker.ops.compiled import CompiledOps


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (library.INVALID, CacheStateError),
        (library.OUT_OF_MEMORY, MemoryError),
        (library.UNAVAILABLE, ConfigError),
        (library.DRIVER, TransferError),
        (library.INTERNAL, InvariantError),
    ],
)
def test_a_code_of_the_core_is_an_error_of_the_package(code, error):
    made = library.Library.__new__(library.Library)
    made.raw = type("Raw", (), {"asked": lambda self: code, "kvswap_last_error": lambda self: b"gone \xff"})()
    with pytest.raises(error, match="gone �"):
        made.call("asked")


@pytest.mark.parametrize(
    ("choice", "is_there", "reason"),
    [
        ("numpy", True, "FASTDEPLOY_KVCACHE_OPS says so"),
        ("", False, "they were not built"),
        ("", True, "of another build"),
    ],
)
def test_without_a_core_there_is_a_reason(monkeypatch, tmp_path, choice, is_there, reason):
    def unfit():
        raise ConfigError("it is of another build")

    monkeypatch.setenv(library.CHOICE, choice)
    monkeypatch.setattr(library, "CORE", tmp_path if is_there else tmp_path / "none")
    monkeypatch.setattr(library, "Library", unfit)
    core, why = library.load()
    assert core is None
    assert reason in why


@pytest.mark.parametrize(("code", "platforms"), [(library.OK, {"cpu", "cuda"}), (library.UNAVAILABLE, {"cpu"})])
def test_the_core_copies_on_a_gpu_where_there_is_a_driver(code, platforms):
    core = CompiledOps(SimpleNamespace(raw=SimpleNamespace(kvswap_cuda_available=lambda: code)))
    assert {platform for _, platform in ops.compiled_implementations(core)} == platforms
