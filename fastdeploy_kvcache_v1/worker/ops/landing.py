"""Which ways to copy live on this GPU: each moves one block to the device and back before it is trusted.

A path that returns other bytes, fails, or is not done in time is left for the next, with one line in the log. So is one
that cannot be tried; plain copies (`runs`) are used then all the same. What remains is timed (`calibration.py`).
Nothing here needs a model; a GPU is used through CuPy.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...errors import ConfigError
from ...metadata import CopyPath
from . import calibration
from .compiled import CUDA_PATHS, CompiledOps, Path
from .host_memory import HostBuffer, host_alloc
from .rows import BlockRows, CopyRun, CopyRuns, LayerRows

logger = logging.getLogger(__name__)

CHOICE = "FASTDEPLOY_KVCACHE_CUDA_PATH"
"""Environment variable: `kernel` forces a path, `-batch` forbids one, `-batch,-kernel` several; `cupy` is one too."""

NAMES = {path.name.lower(): path for path in CUDA_PATHS}
CUPY = "cupy"

TIME_LIMIT_S = 10.0
"""For one path to move one block both ways."""

STAGING_BYTES = 32 << 20
"""Of device memory, for gathering fragmented blocks."""

BROKEN_BATCHES = ("580.159",)
"""Branches of the driver whose cuMemcpyBatchAsync is reported to hang or to crash; forcing the path tries it all the
same."""

RELEASE_FILES = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")

_PORTABLE_AND_MAPPED = 3
"""Flags of cudaHostRegister, as the pool has them."""

_NOT_READY = 600
"""cudaErrorNotReady: the GPU works on it."""

_LATER = "it was refused by the driver after it had been tried"

ROW_BYTES = 16 << 10
SLOTS = 8
RUNS = (CopyRun(0, 5, 2), CopyRun(3, 0, 1), CopyRun(6, 2, 1))
"""A range, and two single blocks that no regular distance joins."""


class Choice(NamedTuple):
    """What the operator wants."""

    forced: str | None = None
    forbidden: frozenset[str] = frozenset()

    def allows(self, name: str) -> bool:
        return name not in self.forbidden and self.forced in (None, name)


@dataclass(frozen=True)
class Landing:
    """What became of each path."""

    live: tuple[str, ...]
    """Names of the paths that AUTO chooses from, or `cupy` alone."""
    left: Mapping[str, str] = field(default_factory=dict)
    """The other ones, and why."""
    costs: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """By direction, `H2D` and `D2H`: the constants of the cost model."""
    measured: bool = False
    """The constants come from this GPU, not from a table."""

    @property
    def works(self) -> bool:
        """A path of the compiled core lives; CuPy copies run by run, which is slow for scattered blocks."""
        return self.live != (CUPY,)

    def paths(self, usable: Collection[str]) -> tuple[CopyPath, ...]:
        """In both directions. Of those that live only `usable` ones still do; where none does, copies go by runs."""
        ways = {name: "" if name in usable else _LATER for name in self.live} | dict(self.left)
        found = []
        for direction, unfit in (("in", Path.STAGED.name.lower()), ("out", "")):
            possible = {name: reason for name, reason in ways.items() if name != unfit}
            if all(possible.values()):
                possible[Path.RUNS.name.lower()] = ""
            found += [CopyPath(direction, name, reason) for name, reason in possible.items()]
        return tuple(found)

    def describe(self) -> str:
        """One line: what lives, what was left and why, and the constants."""
        left = "; ".join(f"{name}: {reason}" for name, reason in self.left.items())
        origin = "measured here" if self.measured else "of the table"
        constants = "; ".join(
            f"{direction} " + ", ".join(f"{name} {number:.3g}" for name, number in numbers.items())
            for direction, numbers in self.costs.items()
        )
        return ", ".join(self.live) + (f" (not {left})" if left else "") + f"; constants {origin}: {constants}"


def read_choice(environment: Mapping[str, str] = os.environ) -> Choice:
    """Raises `ConfigError` for a name that is no path."""
    words = [word.strip() for word in environment.get(CHOICE, "").split(",") if word.strip()]
    names = [word.removeprefix("-") for word in words]
    unknown = sorted(set(names) - {*NAMES, CUPY})
    forced = [word for word in words if not word.startswith("-")]
    if unknown or len(forced) > 1:
        raise ConfigError(
            f"{CHOICE}={environment[CHOICE]} must be one of {', '.join([*NAMES, CUPY])}, or such names with '-' before "
            "each: set it to one path, or to those to leave out"
        )
    return Choice(forced[0] if forced else None, frozenset(name for name in names if f"-{name}" in words))


def land(compiled: CompiledOps, cupy: Any, device: int, host: HostBuffer, choice: Choice) -> Landing:
    """Try every path that this build and `choice` have, on the page-locked `host`, whose bytes are zero again
    afterwards. AUTO chooses among those that came back equal from now on; where none did, `live` is `cupy` alone.

    Raises `ConfigError` for a path that broke the CUDA context: nothing in this process can use the GPU any more.
    """
    left: dict[str, str] = {}
    untried, failed = "", list[str]()
    if not _give_staging(cupy, compiled):
        left[Path.STAGED.name.lower()] = "the GPU has no memory for it"
    doubt = _doubt_in_batches(driver_release())
    for name, path in NAMES.items():
        if not choice.allows(name):
            left[name] = f"{CHOICE} says so"
        elif not compiled.has_cuda_path(path):
            left.setdefault(name, "this build or driver lacks it")
        elif path is Path.BATCH and doubt and choice.forced != name:
            left[name] = doubt
        elif untried:
            left.setdefault(name, untried)
        elif name not in left:
            try:
                problem = _try(cupy, device, compiled, path)
                _require_context(cupy, choice, [*failed, name])
            except _NoTrialError as error:
                _require_context(cupy, choice, failed or [name])
                left[name] = untried = f"the GPU gives no memory to try it: {error}"
                logger.warning("plain copies take the place of copy paths that cannot be tried: %s", untried)
                continue
            if problem is not None:
                left[name] = problem
                failed.append(name)
                logger.warning("copies between GPU and host do without the path %s: %s", name, problem)
    plain = Path.RUNS.name.lower()
    if untried and left.get(plain) == untried:
        del left[plain]
    live = tuple(name for name in NAMES if name not in left)
    compiled.allow_cuda_paths([NAMES[name] for name in live])
    measured = bool(live) and not untried and calibration.calibrate(compiled, cupy, host, live)
    _require_context(cupy, choice, live or failed)
    host.array[: calibration.BYTES] = 0
    costs = {
        "H2D": compiled.costs(to_device=True).by_name(),
        "D2H": compiled.costs(to_device=False).by_name(),
    }
    landing = Landing(live or (CUPY,), left, costs, measured)
    logger.info("copies between GPU and host: %s", landing.describe())
    return landing


def driver_release() -> str:
    """As `580.65.06`; empty where neither the system nor NVML tells."""
    for path in RELEASE_FILES:
        with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
            if found := re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", file.read()):
                return found[0]
    return _release_by_nvml()


def _release_by_nvml() -> str:
    """Containers without the kernel module's files have NVML, if nvidia-smi works in them."""
    text = ctypes.create_string_buffer(80)
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        if nvml.nvmlInit_v2() != 0:
            return ""
        nvml.nvmlSystemGetDriverVersion(text, ctypes.c_uint(len(text)))
        nvml.nvmlShutdown()
    except (OSError, AttributeError):
        return ""
    return text.value.decode("ascii", errors="replace")


def _doubt_in_batches(release: str) -> str:
    """Why a driver's cuMemcpyBatchAsync is not tried; empty for one that nothing is said against."""
    if not release:
        return f"the driver's release is unknown, and some hang in it: {CHOICE}=batch tries it all the same"
    if any(f"{release}.".startswith(f"{branch}.") for branch in BROKEN_BATCHES):
        return f"driver {release} is known to hang in it"
    return ""


def _give_staging(cupy: Any, compiled: CompiledOps) -> bool:
    try:
        compiled.set_staging(int(cupy.cuda.runtime.malloc(STAGING_BYTES)), STAGING_BYTES)
    except Exception as error:
        logger.warning("fragmented blocks are not gathered, the GPU gives no memory for it: %s", error)
        return False
    return True


class _Memory:
    """A small device tier of two layers with two roles, and as many host blocks. Not the pool's: a copy that is given
    up may still be made, long after."""

    def __init__(self, cupy: Any) -> None:
        self._runtime = cupy.cuda.runtime
        self._buffer = host_alloc(SLOTS * 4 * ROW_BYTES)
        self._device = int(self._runtime.malloc(SLOTS * 4 * ROW_BYTES))
        self._runtime.hostRegister(self._buffer.address, self._buffer.nbytes, _PORTABLE_AND_MAPPED)
        self.host = self._buffer.array.reshape(SLOTS, 4 * ROW_BYTES)
        addresses = [self._device + role * SLOTS * ROW_BYTES for role in range(4)]
        self.device_rows = [BlockRows(address, SLOTS, ROW_BYTES, ROW_BYTES, on_gpu=True) for address in addresses]
        self.host_rows = [
            BlockRows(self._buffer.address + role * ROW_BYTES, SLOTS, ROW_BYTES, 4 * ROW_BYTES) for role in range(4)
        ]

    def free(self) -> None:
        """Only when every copy has been made."""
        self._runtime.hostUnregister(self._buffer.address)
        self._runtime.free(self._device)


_given_up: list[_Memory] = []
"""Memory that a copy may still touch, kept for the rest of the process."""


def _require_context(cupy: Any, choice: Choice, suspects: Collection[str]) -> None:
    """What breaks a CUDA context, an illegal access for example, every later call of the process is answered with."""
    try:
        event = cupy.cuda.Event(disable_timing=True)
        status = cupy.cuda.runtime.eventQuery(event.ptr)
        problem = "" if status in (0, _NOT_READY) else f"CUDA error {status}"
    except Exception as error:
        problem = f"{type(error).__name__}: {error}".splitlines()[0]
    if problem:
        without = ",".join(f"-{name}" for name in NAMES if name in choice.forbidden.union(suspects))
        raise ConfigError(
            f"the CUDA context broke ({problem}) when copies by {' or '.join(suspects)} were tried: start again with "
            f"{CHOICE}={without}"
        )


class _NoTrialError(Exception):
    """There is no memory to try a path with."""


def _try(cupy: Any, device: int, compiled: CompiledOps, path: Path) -> str | None:
    """Why `path` cannot be trusted. On a thread of its own, which is left behind where a call never returns. Raises
    `_NoTrialError`.
    """
    try:
        memory = _Memory(cupy)
    except Exception as error:
        raise _NoTrialError(str(error)) from error
    outcome: list[str | None] = []

    def run() -> None:
        try:
            cupy.cuda.Device(device).use()
            outcome.append(_round_trip(cupy, compiled, path, memory))
        except Exception as error:  # thread edge: whatever a path fails with, the next one is tried
            outcome.append(f"{type(error).__name__}: {error}".splitlines()[0])

    thread = threading.Thread(target=run, name=f"kv-try-{path.name.lower()}", daemon=True)
    thread.start()
    thread.join(2 * TIME_LIMIT_S)
    if outcome and outcome[0] is None:
        memory.free()
    else:
        _given_up.append(memory)
    return outcome[0] if outcome else f"a driver call did not return within {2 * TIME_LIMIT_S:.0f} s"


def _round_trip(cupy: Any, compiled: CompiledOps, path: Path, memory: _Memory) -> str | None:
    stream = cupy.cuda.Stream(non_blocking=True)
    rng = np.random.default_rng(int(path))
    memory.host[:] = rng.integers(0, 256, memory.host.shape, dtype=np.uint8)
    expected = memory.host.copy()
    into = CopyRuns.of(RUNS)
    out = CopyRuns.of([CopyRun(run.target, run.source, run.blocks) for run in RUNS])
    for number, (targets, sources, runs) in enumerate(
        [(memory.device_rows, memory.host_rows, into), (memory.host_rows, memory.device_rows, out)]
    ):
        by = Path.KERNEL if path is Path.STAGED and number == 0 else path
        compiled.swap_cache_per_layer(LayerRows(targets), LayerRows(sources), runs, int(stream.ptr), by)
        if not _arrives(cupy, stream):
            return f"a copy of one block was not done within {TIME_LIMIT_S:.0f} s"
        if number == 0:
            for run in RUNS:
                memory.host[run.source : run.source + run.blocks] = 0xA5
    return None if (memory.host == expected).all() else "a block came back with other bytes"


def _arrives(cupy: Any, stream: Any) -> bool:
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    deadline = time.monotonic() + TIME_LIMIT_S
    while (status := cupy.cuda.runtime.eventQuery(event.ptr)) != 0:
        if status != _NOT_READY:
            raise RuntimeError(f"CUDA error {status}")
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.0002)
    return True
