"""Which copy paths are trusted: each fault of a path, and what is left. The core is a fake one, as is the GPU.

`tests/gpu/suite.py` lands on the real core, over the asynchronous driver or on a GPU.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError, TransferError
from fastdeploy_kvcache_v1.worker import ops
from fastdeploy_kvcache_v1.worker.ops import CopyRuns, LayerRows, cupy_copies, landing
from fastdeploy_kvcache_v1.worker.ops.compiled import CUDA_PATHS, Costs, Path
from fastdeploy_kvcache_v1.worker.runtime import CudaRuntime
from tests.gpu.stand_in.in_process import COMPUTE, OUT_OF_MEMORY, PythonDriver
from tests.world.clock import Clock


class HangsError(BaseException):
    """A call that does not return."""


class InlineThread:
    """A thread that has run when it was started, unless it hangs."""

    def __init__(self, target: Callable[[], None], name: str, *, daemon: bool) -> None:
        assert daemon, "a process ends in spite of a call that never returns"
        self._target, self._name = target, name

    def start(self) -> None:
        with contextlib.suppress(HangsError):
            self._target()

    def join(self, seconds: float) -> None:
        assert seconds == 2 * landing.TIME_LIMIT_S


class FakeCore:
    """Copies by CuPy, whatever the path. A fault is how many runs get lost, or what a call of the path raises."""

    def __init__(self, gpu: PythonDriver) -> None:
        self.gpu = gpu
        self.faults: dict[str, int | BaseException] = {}
        self.broken_by: set[str] = set()
        """Paths after which the GPU answers with an error."""
        self.stuck: set[str] = set()
        """Paths whose copies the GPU never makes."""
        self.used: list[Path] = []
        self.staging = (0, 0)
        self.cuda_paths = frozenset(CUDA_PATHS)
        self._costs = {way: Costs(*[7.0] * len(Costs._fields_)) for way in (True, False)}

    def has_cuda_path(self, path: Path) -> bool:
        return True

    def allow_cuda_paths(self, paths: list[Path]) -> None:
        self.cuda_paths = frozenset(paths)

    def set_staging(self, address: int, nbytes: int) -> None:
        self.staging = address, nbytes

    def costs(self, *, to_device: bool) -> Costs:
        return Costs.from_buffer_copy(self._costs[to_device])

    def set_costs(self, costs: Costs, *, to_device: bool) -> None:
        self._costs[to_device] = costs

    def swap_cache_per_layer(
        self, targets: LayerRows, sources: LayerRows, runs: CopyRuns, stream: int, path: Path = Path.AUTO
    ) -> None:
        assert not (path is Path.STAGED and targets.on_gpu), "it gathers on the device"
        for rows in (*targets, *sources):
            is_of_a_trial = rows.on_gpu and rows.row_bytes == landing.ROW_BYTES
            assert not is_of_a_trial or self.gpu.owns(rows.address, rows.num_rows * rows.pitch)
        name = path.name.lower()
        fault = self.faults.get(name, 0)
        if isinstance(fault, BaseException):
            raise fault
        self.used.append(path)
        self.gpu.statuses.pop("cuEventQuery", None)
        if name in self.broken_by:
            self.gpu.statuses |= dict.fromkeys(("cuEventQuery", "cuMemHostUnregister", "cuMemFree"), 700)
        if name in self.stuck:
            self.gpu.statuses["cuEventQuery"] = 600
        cupy_copies.swap_cache_per_layer(targets, sources, CopyRuns.of(runs)[fault:], stream)

    def swap_cache_all_layers(self, *_: object) -> None:
        raise AssertionError("not asked for")


GOOD_RELEASE = "580.65.06"


@pytest.fixture
def core(gpu, monkeypatch, caplog):
    """The compiled core of a machine with a GPU, on which nothing has landed yet."""
    caplog.set_level("INFO")
    clock = Clock()
    timers = types.SimpleNamespace(monotonic=clock, sleep=lambda seconds: clock.advance(0.01))
    monkeypatch.setattr(landing, "time", timers)
    monkeypatch.setattr(landing, "threading", types.SimpleNamespace(Thread=InlineThread))
    monkeypatch.setattr(landing, "driver_release", lambda: GOOD_RELEASE)
    monkeypatch.setattr(landing, "_given_up", [])
    monkeypatch.delenv(landing.CHOICE, raising=False)
    made = FakeCore(gpu)
    monkeypatch.setattr(ops, "COMPILED", made)
    for op in ("swap_cache_per_layer", "swap_cache_all_layers"):
        ops.install(op, "cuda", ops.Implementation("compiled", getattr(made, op)))
    return made


def land(nbytes=5 << 20):
    runtime = CudaRuntime(compute_handle=COMPUTE)
    pool = runtime.allocate_host(nbytes)
    assert not pool.array.any(), "its bytes are zero again"
    runtime.free_host(pool)
    return ops.landed()


def told(caplog, level="WARNING"):
    return [record.getMessage() for record in caplog.records if record.levelname == level]


def copies_right():
    """By whatever is live now."""
    memory, target = np.arange(4096).astype(np.uint8).reshape(8, 512), np.zeros((8, 512), np.uint8)
    source_rows = (ops.BlockRows(memory.ctypes.data, 8, 512, 512),)
    target_rows = (ops.BlockRows(target.ctypes.data, 8, 512, 512, on_gpu=True),)
    ops.swap_cache_per_layer(target_rows, source_rows, [ops.CopyRun(0, 4, 1), ops.CopyRun(5, 1, 2)], stream=COMPUTE)
    ops.COMPILED.gpu.run_all()
    return (target[4] == memory[0]).all() and (target[1:3] == memory[5:7]).all() and not target[0].any()


def test_every_path_lives_where_nothing_is_wrong(core, caplog):
    landed = land()
    assert (landed.live, landed.left) == (("kernel", "staged", "batch", "runs"), {})
    assert told(caplog) == []
    assert told(caplog, "INFO")[-1].startswith(
        "copies between GPU and host: kernel, staged, batch, runs; constants measured here: H2D call_ns "
    )
    assert copies_right()
    assert core.staging[1] == landing.STAGING_BYTES
    (kept,) = core.gpu.memory.values()
    assert kept.nbytes - 256 == landing.STAGING_BYTES
    assert core.gpu.registered == {}
    core.faults["batch"] = 1
    assert land() is ops.land(None, 0, None) is landed, "once per process"


NO_COPY = "a copy of one block was not done within 10 s"
FAULTS = {
    # what happens: path, fault, paths that live, why that one does not
    "a block is lost": ("batch", 1, "kernel staged runs", "a block came back with other bytes"),
    "it never returns": ("batch", HangsError(), "kernel staged runs", "a driver call did not return within 20 s"),
    "it fails": ("batch", TransferError("CUDA 1\nmore"), "kernel staged runs", "TransferError: CUDA 1"),
    "the GPU never makes it": ("batch", "stuck", "kernel staged runs", NO_COPY),
    "plain copies lose a block": ("runs", 1, "kernel staged batch", "a block came back with other bytes"),
    "the kernel loses a block": ("kernel", 1, "batch runs", "a block came back with other bytes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_path_that_cannot_be_trusted_is_left(core, caplog, fault):
    path, what, live, reason = FAULTS[fault]
    if what == "stuck":
        core.stuck.add(path)
    else:
        core.faults[path] = what
    landed = land()
    assert landed.live == tuple(live.split())
    assert landed.left[path] == reason
    assert f"copies between GPU and host do without the path {path}: {reason}" in told(caplog)
    assert core.cuda_paths == {Path[name.upper()] for name in landed.live}
    assert f"(not {'; '.join(f'{name}: {why}' for name, why in landed.left.items())})" in landed.describe()
    assert copies_right() or path == "runs"


def test_where_no_path_works_cupy_copies(core, caplog):
    core.faults |= dict.fromkeys(("kernel", "batch", "runs"), 1)
    landed = land()
    assert (landed.live, landed.works, landed.measured) == (("cupy",), False, False)
    assert set(landed.left) == {"kernel", "staged", "batch", "runs"}
    assert ops.live()["swap_cache_per_layer.cuda"] == ops.live()["swap_cache_all_layers.cuda"] == "cupy"
    assert copies_right()
    assert {path.name for path in ops.copy_paths("cuda") if not path.left} == {"cupy"}


def test_a_worker_tells_which_paths_live_in_which_direction_and_why_others_do_not(core):
    assert ops.copy_paths("cuda") == ()
    core.faults["batch"] = 1
    land()
    lost, later = "a block came back with other bytes", "it was refused by the driver after it had been tried"
    expected = {("in", "kernel"): "", ("in", "runs"): "", ("in", "batch"): lost}
    expected |= {("out", name): reason for (_, name), reason in expected.items()} | {("out", "staged"): ""}
    assert {(path.direction, path.name): path.left for path in ops.copy_paths("cuda")} == expected
    core.cuda_paths -= {Path.KERNEL}
    found = {(path.direction, path.name): path.left for path in ops.copy_paths("cuda")}
    assert found == expected | dict.fromkeys([("in", "kernel"), ("out", "kernel")], later)


@pytest.mark.parametrize(
    ("choice", "left_out"), [("", "-batch"), ("batch", "-batch"), ("-staged,-kernel", "-kernel,-staged,-batch")]
)
def test_a_path_that_breaks_the_context_ends_the_worker_in_words(core, monkeypatch, choice, left_out):
    """A broken context answers every later call with its error: one of them would fail far from here."""
    monkeypatch.setenv(landing.CHOICE, choice)
    core.broken_by.add("batch")
    with pytest.raises(ConfigError) as caught:
        land()
    assert str(caught.value) == (
        "the CUDA context broke (CUDA error 700) when copies by batch were tried: "
        f"start again with FASTDEPLOY_KVCACHE_CUDA_PATH={left_out}"
    )


@pytest.mark.parametrize(
    # allocations that work: of the staging memory, then one to try each path
    ("room", "live"),
    [*enumerate(["runs", "runs", "kernel runs", "kernel staged runs", *["kernel staged batch runs"] * 3])],
)
def test_a_path_lives_only_if_it_was_tried_wherever_memory_ends(core, caplog, room, live):
    allocate, left = core.gpu.cuMemAlloc, iter(range(room))
    core.gpu.cuMemAlloc = lambda *given: OUT_OF_MEMORY if next(left, None) is None else allocate(*given)
    landed = land()
    assert landed.live == tuple(live.split())
    assert {path.name.lower() for path in core.used} | {"runs"} == {*landed.live, "runs"}
    assert landed.measured == (room > 5)
    assert copies_right()
    trial = "the GPU gives no memory to try it: cudaError2: cuMemAlloc"
    assert all(landed.left[name] == trial for name in ("kernel", "batch") if name not in landed.live)
    gathers = ["fragmented blocks are not gathered, the GPU gives no memory for it: cudaError2: cuMemAlloc"]
    plain = [f"plain copies take the place of copy paths that cannot be tried: {trial}"]
    untimed = ["the copy paths are not timed, the GPU gives no memory for it: cudaError2: cuMemAlloc"]
    assert told(caplog) == gathers * (room < 1) + plain * (room < 5) + untimed * (room == 5)


@pytest.mark.parametrize(
    ("choice", "live"),
    [
        *((path, path) for path in ("kernel", "batch", "cupy")),
        ("-kernel, -staged", "batch runs"),
        ("-batch", "kernel staged runs"),
    ],
)
def test_a_path_is_forced_or_forbidden(core, monkeypatch, choice, live):
    monkeypatch.setenv(landing.CHOICE, choice)
    landed = land()
    assert landed.live == tuple(live.split())
    assert set(landed.left.values()) == {"FASTDEPLOY_KVCACHE_CUDA_PATH says so"}
    assert (Path.BATCH in core.used) == ("batch" in live)


@pytest.mark.parametrize("choice", ["kernels", "kernel,batch", "-runs,dma"])
def test_a_name_that_is_no_path_is_refused(choice):
    with pytest.raises(ConfigError, match=f"{landing.CHOICE}={choice} must be one of kernel"):
        landing.read_choice({landing.CHOICE: choice})


HANGS = "driver {} is known to hang in it"
UNKNOWN = f"the driver's release is unknown, and some hang in it: {landing.CHOICE}=batch tries it all the same"


@pytest.mark.parametrize(
    ("release", "reason"),
    [
        *((release, HANGS) for release in ("580.159.04", "580.159.03", "580.159")),
        ("", UNKNOWN),
        *((release, None) for release in ("580.15.01", "580.160.01", "580.1590.01", "580.65.06")),
    ],
)
@pytest.mark.parametrize("forced", [False, True])
def test_batches_are_not_asked_of_a_driver_that_is_unknown_or_of_a_branch_that_hangs(
    core, monkeypatch, release, reason, forced
):
    monkeypatch.setattr(landing, "driver_release", lambda: release)
    if forced:
        monkeypatch.setenv(landing.CHOICE, "batch")
    landed = land()
    assert landed.left.get("batch") == (None if forced or reason is None else reason.format(release))
    assert (Path.BATCH in core.used) == ("batch" in landed.live)


@pytest.mark.parametrize(
    ("module", "process", "release"),
    [
        # what /sys/module and /proc hold, what is read
        ("580.65.06\n", "Kernel Module  580.159.03  Release", "580.65.06"),
        ("nothing\n", "Kernel Module  580.159.03  Release", "580.159.03"),
        ("\n", "nothing", ""),
    ],
)
def test_the_driver_release_is_read_wherever_it_stands(tmp_path, monkeypatch, module, process, release):
    def no_library(name):
        raise OSError(f"{name}: cannot open shared object file")

    files = tmp_path / "none", tmp_path / "module", tmp_path / "process"
    files[1].write_text(module)
    files[2].write_text(process)
    monkeypatch.setattr(landing, "RELEASE_FILES", files)
    monkeypatch.setattr(landing.ctypes, "CDLL", no_library)
    assert landing.driver_release() == release


def test_a_gpu_that_cannot_be_timed_copies_all_the_same(core, caplog):
    core.gpu.statuses["cuEventElapsedTime"] = 1
    landed = land()
    assert (landed.live, landed.measured) == (("kernel", "staged", "batch", "runs"), False)
    assert told(caplog) == [
        "the copy paths could not be timed, the constants of the table hold: cudaError1: cuEventElapsedTime"
    ]
    assert copies_right()
