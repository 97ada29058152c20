"""Queues of the compiled core, and what is asked of the core where only a GPU could do the rest.

That streams over queues keep their promises is shown by the suite of all runtimes.
"""

from __future__ import annotations

import gc
import weakref
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError, InvariantError, TransferError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import library
from fastdeploy_kvcache_v1.worker.ops.compiled import CompiledOps
from fastdeploy_kvcache_v1.worker.ops.queues import Queue
from tests.worker.ops.native import require_core, run_python

LIMIT_NS = 20_000_000_000


@pytest.fixture
def compiled():
    return require_core()


def test_work_that_is_skipped_or_refused_is_let_go(compiled):
    """Else every failed unit would keep what its functions hold, for ever."""

    class Held:
        def use(self) -> None:
            raise AssertionError("not to be called")

    queue, held = Queue(compiled.library, "held"), [Held(), Held()]
    watched = [weakref.ref(one) for one in held]
    queue.begin()
    queue.call(lambda: 1 / 0)
    queue.call(held[0].use)
    event = queue.record()
    assert event.wait(LIMIT_NS)
    assert isinstance(event.error, ZeroDivisionError)
    queue.close()
    with pytest.raises(CacheStateError, match="there is no queue"):
        queue.call(held[1].use)
    del held
    gc.collect()
    assert [one() for one in watched] == [None, None]


ENDS_WITH_COPIES = """
import numpy as np
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import BlockRows, CopyRun, CopyRuns
from fastdeploy_kvcache_v1.worker.ops.queues import Queue
queue, target, source = Queue(ops.COMPILED.library, "late"), np.zeros((8, 4 << 20), np.uint8), ops.host_alloc(32 << 20)
rows = [(BlockRows(address, 8, 4 << 20, 4 << 20),) for address in (target.ctypes.data, source.address)]
for _ in range(100):
    ops.COMPILED.swap_cache_per_layer(*rows, CopyRuns.of([CopyRun(0, 0, 8)]), queue.id)
"""


@pytest.mark.process
def test_a_process_may_end_with_copies_in_its_queues(compiled):
    """The interpreter frees the memory of its objects; nobody may write there any more."""
    done = run_python(ENDS_WITH_COPIES)
    assert done.returncode == 0, done.stderr


# ---- what is asked of the core, and what is made of its answers


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
