"""What the ways to copy do on this GPU, before the cache relies on them.

Each is tried by a process of its own (`runtime/copy_trial.py`), where a crash, a hang or a broken CUDA context costs
nothing. What it did not say is not used. What it said is kept on disk, by GPU, driver, kernel and row sizes.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...cache_directory import cache_directory
from ...errors import ConfigError, ModelFetchError
from .cuda_copies import PTX
from .driver import uuid_of
from .rates import BATCH, KERNEL, RUNS, WAYS, Rates, Timing

logger = logging.getLogger(__name__)

CHOICE = "FASTDEPLOY_KVCACHE_CUDA_PATH"
"""Environment variable: `kernel` forces a way, `-batch` leaves one out, `-batch,-kernel` several."""

_CHILD = """
import sys
sys.path.append(sys.argv[1])
from fastdeploy_kvcache_v1.worker.runtime import copy_trial
copy_trial.main()
"""
"""This package comes last on the path: beside it may lie what goes by a name of the standard library's."""

LIMIT_S = 60.0
"""For one way; a GPU that works takes a few seconds, most of them for the start of a process."""

STANDARD = (8 << 10, 16 << 10, 32 << 10, 128 << 10)
"""Bytes of rows that are timed besides those of the cache: ways change places between them."""

MOST_ROW = 1 << 20
"""Wider rows are timed as rows of so many bytes."""

RELEASE_FILES = ("/sys/module/nvidia/version", "/proc/driver/nvidia/version")

_EDITION = 1
"""Of what is tried: what an older one found is not used."""

_COMPUTE_MODE = 20
"""cudaDevAttrComputeMode: 0 where any number of processes may use the GPU at once."""

_REPLACED = {"staged": f"use {KERNEL}", "cupy": f"use {RUNS}", "auto": "leave the variable out"}

_known = Rates()


class Answer(NamedTuple):
    """What is known of one way; also as JSON, the last line of the process that tries it."""

    left: str = ""
    """Why it is not used; empty where it works."""
    is_wrong: bool = False
    """Bytes were not what they had to be."""
    is_lasting: bool = True
    """It would be the same another time."""
    reach: int = 0
    timings: Sequence[tuple[bool, int, float, float]] = ()
    """To the device or from it, then the fields of a `Timing`."""


class Ended(NamedTuple):
    """A process that tried a way."""

    status: int | None
    """As of `subprocess`; None where it was not done in time."""
    said: str
    complained: str


def known() -> Rates:
    """What was found in this process; plain copies before."""
    return _known


def rates_of(device: int, row_bytes: Sequence[int], *, run: Callable[[str], Ended] | None = None) -> Rates:
    """What works on GPU `device`, and how fast it is for rows of these bytes; `known` from now on.

    Takes milliseconds where it was found before, else seconds, and `LIMIT_S` for each way that hangs. `run` takes the
    task of a process. Raises `ConfigError` for a wrong `CHOICE`, and where plain copies give other bytes.
    """
    global _known
    sizes = sorted({*STANDARD, *(min(each, MOST_ROW) for each in row_bytes)})
    ways, is_forced = read_choice()
    left = {way: f"{CHOICE} says so" for way in WAYS if way not in ways}
    release = driver_release()
    if (doubt := _doubt_in_batches(release)) and not is_forced:
        left.setdefault(BATCH, doubt)
    import cupy

    if cupy.cuda.runtime.deviceGetAttribute(_COMPUTE_MODE, device):
        left = dict.fromkeys(WAYS, "the GPU's compute mode admits no second process to try it") | left
    todo = [way for way in WAYS if way not in left]
    key = [_EDITION, uuid_of(device).hex(), release, PTX.read_text().partition("\n")[0], sizes]
    answers = _answers(key, todo, device, sizes, run or run_child) if todo else {}
    _known = _rates(answers, left)
    logger.info("copies between GPU and host: %s", _known.describe())
    return _known


def read_choice(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, ...], bool]:
    """The ways that may be used, and whether one is forced. Raises `ConfigError` for what names none."""
    text = environment.get(CHOICE, "")
    words = [word for part in text.split(",") if (word := part.strip())]
    names = [word.removeprefix("-") for word in words]
    if gone := [name for name in names if name in _REPLACED]:
        raise ConfigError(f"{CHOICE}={text}: {gone[0]} is no way to copy any more: {_REPLACED[gone[0]]}")
    forced = tuple(word for word in words if word in WAYS)
    if len(forced) > 1 or not {*names} <= {*WAYS}:
        raise ConfigError(f"{CHOICE}={text} must be one of {', '.join(WAYS)}, or those to leave out, as -batch,-kernel")
    return forced or tuple(way for way in WAYS if way not in names), bool(forced)


def _rates(answers: Mapping[str, Answer], left: dict[str, str]) -> Rates:
    if RUNS in answers and answers[RUNS].is_wrong:
        raise ConfigError(
            f"plain copies between GPU and host give other bytes ({answers[RUNS].left}): this machine is broken, serve "
            "on another one"
        )
    left = left | {way: answer.left for way, answer in answers.items() if answer.left}
    live = {way: answer for way, answer in answers.items() if not answer.left}
    if not live:
        reasons = "; ".join(f"{way}: {reason}" for way, reason in left.items())
        logger.warning("copies between GPU and host are plain ones (%s), untried: %s", RUNS, reasons)
        left.pop(RUNS, None)
    timings = {
        way: {to: tuple(Timing(*each[1:]) for each in answer.timings if each[0] == to) for to in (True, False)}
        for way, answer in live.items()
    }
    return Rates(timings, left, min((answer.reach for answer in live.values()), default=0))


def _answers(
    key: list[Any], ways: list[str], device: int, sizes: list[int], run: Callable[[str], Ended]
) -> dict[str, Answer]:
    """From the disk, else by trial: processes of one user take turns, because they would slow each other down."""
    try:
        directory = cache_directory() / "copies"
    except ModelFetchError:
        directory = Path(os.devnull)  # nothing can be read or written there
    path = directory / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
    answers = _read(path, sizes)
    if not {*ways} <= {*answers}:
        with contextlib.ExitStack() as turn:
            with contextlib.suppress(OSError):
                directory.mkdir(parents=True, exist_ok=True)
                fcntl.flock(turn.enter_context(open(directory / "turn", "w", encoding="utf-8")), fcntl.LOCK_EX)
            answers = _read(path, sizes)  # another rank may have tried this GPU meanwhile
            for way in ways:
                if way not in answers:
                    answers[way] = _ask(way, device, sizes, run)
            if key[2]:  # else another driver would not be noticed
                _write(path, {way: answer for way, answer in answers.items() if answer.is_lasting})
    return {way: answers[way] for way in ways}


def _ask(way: str, device: int, sizes: list[int], run: Callable[[str], Ended]) -> Answer:
    status, said, complained = run(json.dumps({"way": way, "device": device, "row_bytes": sizes}))
    last = (said.splitlines() or [""])[-1]
    with contextlib.suppress(ValueError, TypeError):
        answer = _answer(json.loads(last), sizes)
        if answer.left or status == 0:
            return answer
    at = "" if not last or last.startswith("{") else f", {last}"
    if status is None:
        has_begun = bool(at)  # else the machine was too slow to start a process
        return Answer(f"its trial was not done within {LIMIT_S:.0f} s{at}", is_lasting=has_begun)
    how = (status < 0 and signal.strsignal(-status)) or f"status {status}"
    why = "".join(f": {line}" for line in complained.splitlines()[-1:]) if status > 0 else ""
    return Answer(f"its trial ended with {how}{at}{why}", is_lasting=False)


def _answer(fields: Any, sizes: list[int]) -> Answer:
    """Raises `TypeError` or `ValueError` for what is none, or not a whole one."""
    answer = Answer(**fields)
    timed = [(to, row_bytes) for to, row_bytes, apart, joined in answer.timings if min(apart, joined) > 0]
    if not answer.left and (timed != [(to, each) for to in (True, False) for each in sizes] or answer.reach <= 0):
        raise ValueError("not everything was timed")
    return answer


def _read(path: Path, sizes: list[int]) -> dict[str, Answer]:
    """Empty where there is none, or a broken one."""
    try:
        found = json.loads(path.read_bytes())
        return {way: _answer(found[way], sizes) for way in WAYS if way in found}
    except (OSError, ValueError, TypeError):
        return {}


def _write(path: Path, answers: Mapping[str, Answer]) -> None:
    """All of it or nothing."""
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump({way: answer._asdict() for way, answer in answers.items()}, file)
        os.replace(file.name, path)
    except OSError as error:
        logger.info("the ways to copy are tried again at the next start: %s", error)


def run_child(task: str) -> Ended:
    """The process that tries a way, killed when its time is over."""
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(Path(__file__).parents[3]), task],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    try:
        return Ended(None, *child.communicate(timeout=LIMIT_S))._replace(status=child.returncode)
    except subprocess.TimeoutExpired:
        child.kill()
    try:
        return Ended(None, *child.communicate(timeout=5))
    except subprocess.TimeoutExpired:  # inside the driver even that may wait: it is left behind
        return Ended(None, "", "")


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
    """Why a driver's cuMemcpyBatchAsync is not tried: it may live through a trial, and hang under load."""
    if not release:
        return f"the driver's release is unknown, and some hang in it: {CHOICE}={BATCH} tries it all the same"
    return f"driver {release} is known to hang in it" if f"{release}.".startswith("580.159.") else ""
