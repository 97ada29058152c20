"""Trials of the copy paths on this GPU, before the cache relies on them.

Each path has a process of its own (`trial_process.py`), where a crash, a hang or a broken CUDA context does no harm.
Results are kept on disk by GPU, driver, kernel and row sizes.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from ...config import cache_directory
from ...errors import ConfigError, ModelFetchError
from ..ops.copies import CHOICE as OPS
from .copies import IN_WARPS, OUT_AT_ONCE, OUT_BY_LAYER, PTX
from .driver import load_cupy, uuid_of
from .rates import BATCH, PATHS, SPANS, Rates, Timing

logger = logging.getLogger(__name__)

CHOICE = "FASTDEPLOY_KVCACHE_CUDA_PATH"
"""Environment variable: `kernel` forces a path, `-batch` excludes one, `-batch,-kernel` several."""
LIMIT_S = 60.0
"""For one path; a working GPU takes a few seconds, mostly to start the process."""
STANDARD = (8 << 10, 16 << 10, 32 << 10, 128 << 10)
"""Row sizes that are timed besides those of the cache: the fastest path changes between them."""
MOST_ROW = 1 << 20
"""Wider rows are timed at this size."""
_MODULE_RELEASE = Path("/sys/module/nvidia/version")
_EDITION = 3
"""Of the trial: results of another edition are ignored."""
_known = Rates()


class Answer(msgspec.Struct, frozen=True):
    """Result for one path; as JSON the last line of the process that tries it."""

    left: str = ""
    """Reason why it is not used; empty if it works."""
    is_wrong: bool = False
    """It copied wrong bytes."""
    is_lasting: bool = True
    """False: another trial may give another result."""
    reach: int = 0
    timings: tuple[tuple[Timing, ...], tuple[Timing, ...]] = ((), ())
    """From the device, and to it, as in `Rates`."""

    def is_whole(self, sizes: list[int]) -> bool:
        """True if it has a reason in `left`, or all times of rows of these sizes."""
        timed = [[each.row_bytes for each in side if min(each.apart, each.joined) > 0] for side in self.timings]
        return bool(self.left) or (timed == [sizes, sizes] and self.reach > 0)


def known() -> Rates:
    """Result of `rates_of` in this process; before, plain copies."""
    return _known


def rates_of(device: int, row_bytes: Sequence[int]) -> Rates:
    """Measure the paths of GPU `device` for rows of these bytes, or read earlier results; sets `known`.

    Takes milliseconds with earlier results, else seconds, and `LIMIT_S` per path that hangs. Raises `ConfigError` for a
    wrong `CHOICE`, without CuPy, and if plain copies give wrong bytes.
    """
    global _known
    sizes = sorted({*STANDARD, *(min(each, MOST_ROW) for each in row_bytes)})
    release = driver_release()
    left = _unwanted(release)
    runtime = load_cupy().cuda.runtime
    if runtime.deviceGetAttribute(runtime.cudaDevAttrComputeMode, device):  # 0: any number of processes at once
        left = dict.fromkeys(PATHS, "the GPU's compute mode admits no second process to try it") | left
    answers = {path: Answer(reason) for path, reason in left.items()}
    if todo := [path for path in PATHS if path not in left]:
        kernel = PTX.read_text().partition("\n")[0], OUT_AT_ONCE, OUT_BY_LAYER, IN_WARPS
        key = msgspec.json.encode([_EDITION, uuid_of(device).hex(), release, *kernel, sizes])
        name = hashlib.sha256(key).hexdigest()[:32] if release else ""  # another driver would go unnoticed
        answers |= _answers(name, todo, device, sizes)
    _known = _rates({path: answers[path] for path in PATHS})
    logger.info("copies between GPU and host: %s", _known.describe())
    return _known


def _unwanted(release: str) -> dict[str, str]:
    """Paths that are not tried, with the reason: by `CHOICE`, then by the driver. Raises `ConfigError` for a wrong
    `CHOICE`.
    """
    text = os.environ.get(CHOICE, "")
    words = [word for part in text.split(",") if (word := part.strip())]
    names = [word.removeprefix("-") for word in words]
    forced = [word for word in words if word in PATHS]
    if len(forced) > 1 or not {*names} <= {*PATHS}:
        raise ConfigError(
            f"{CHOICE} must be one of {', '.join(PATHS)}, or exclude some as in -batch,-kernel, got {text}"
        )
    left = {}
    if not release and not forced:
        left[BATCH] = f"the driver's release is unknown, and some hang in it: {CHOICE}={BATCH} tries it anyway"
    elif f"{release}.".startswith("580.159.") and not forced:  # it may pass a trial, and hang under load
        left[BATCH] = f"driver {release} is known to hang in it"
    return left | {path: f"{CHOICE} excludes it" for path in PATHS if (path not in forced if forced else path in names)}


def _rates(answers: Mapping[str, Answer]) -> Rates:
    if answers[SPANS].is_wrong:
        raise ConfigError(
            f"plain copies between GPU and host give wrong bytes ({answers[SPANS].left}): the machine is broken, "
            "serve on another one"
        )
    left = {path: answer.left for path, answer in answers.items() if answer.left}
    live = {path: answer for path, answer in answers.items() if not answer.left}
    if not live:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in left.items())
        logger.warning("copies between GPU and host use %s, untried: %s", SPANS, reasons)
        del left[SPANS]
    timings = {path: answer.timings for path, answer in live.items()}
    return Rates(timings, left, min((answer.reach for answer in live.values()), default=0))


def _answers(name: str, paths: list[str], device: int, sizes: list[int]) -> dict[str, Answer]:
    """Read the results, or try. Processes of one user take turns, to not slow each other down. Nothing is kept
    without a `name`.
    """
    try:
        directory = cache_directory() / "copies"
    except ModelFetchError:
        directory = Path(os.devnull)  # reads and writes fail
    file = directory / f"{name}.json"
    answers = _read(file, sizes)
    if not {*paths} <= {*answers}:
        with contextlib.ExitStack() as turn:
            with suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
                fcntl.flock(turn.enter_context(open(directory / "turn", "w", encoding="utf-8")), fcntl.LOCK_EX)
            answers = _read(file, sizes)  # of another rank meanwhile
            answers |= {path: _ask(path, device, sizes) for path in paths if path not in answers}
            with suppress(OSError):  # the next start tries again
                if name:
                    lasting = {path: answer for path, answer in answers.items() if answer.is_lasting}
                    file.write_bytes(msgspec.json.encode(lasting))
    return {path: answers[path] for path in paths}


def _read(file: Path, sizes: list[int]) -> dict[str, Answer]:
    """Read whole results; a file may be partial, because it is written in place."""
    try:
        found = msgspec.json.decode(file.read_bytes(), type=dict[str, Answer])
    except (OSError, msgspec.MsgspecError):
        return {}
    return {path: answer for path, answer in found.items() if answer.is_whole(sizes)}


def _ask(path: str, device: int, sizes: list[int]) -> Answer:
    status, said = run_child(path, device, sizes)
    last = (said.splitlines() or [""])[-1]
    with suppress(msgspec.MsgspecError):
        answer = msgspec.json.decode(last, type=Answer)
        if answer.left or (status == 0 and answer.is_whole(sizes)):
            return answer
    at = f": {last}" if last else ""
    if status is None:  # without output the machine was too slow to start a process
        return Answer(f"its trial was not done within {LIMIT_S:.0f} s{at}", is_lasting=bool(last))
    how = (status < 0 and signal.strsignal(-status)) or f"status {status}"
    return Answer(f"its trial ended with {how}{at}", is_lasting=False)


def run_child(path: str, device: int, sizes: Sequence[int]) -> tuple[int | None, str]:
    """Try a path in a process. Returns its status (None: killed after `LIMIT_S`) and its output."""
    # The package's folder comes last on the path: files beside it may have names of the standard library.
    code = (
        f"import sys; sys.path.append({str(Path(__file__).parents[3])!r})\n"
        "from fastdeploy_kvcache_v1.worker.cuda import trial_process\n"
        f"trial_process.main({path!r}, {device}, {[*sizes]})"
    )
    with open(os.memfd_create("trial"), "w+", encoding="utf-8", errors="replace") as said:
        command = [sys.executable, "-c", code]
        environment = {**os.environ, OPS: "numpy"}  # no native code in the expected bytes
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=said, stderr=said, env=environment)
        try:
            status: int | None = child.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = None
            child.kill()
            with suppress(subprocess.TimeoutExpired):  # stuck in the driver: leave it behind
                child.wait(5)
        said.seek(0)
        return status, said.read()


def driver_release() -> str:
    """Driver release as `580.65.06`; empty if neither the kernel module nor nvidia-smi says it."""
    with suppress(OSError):
        return _MODULE_RELEASE.read_text(encoding="utf-8").strip()
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]  # in containers
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(ask, capture_output=True, text=True, timeout=30, check=True).stdout.partition("\n")[0]
    return ""
