"""Helpers of all benchmarks: options, sizes, traces, percentiles, and the facts that a result carries.

A run is refused in a tree with uncommitted changes and at a load average above 1. `--anyway` allows it; the result
records both, and the docs mark it. `--quick` runs tiny sizes to prove that a program works, and keeps no result.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.lab.traffic import KINDS, Source
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some programs use modules of tests/
RESULTS = ROOT / "benchmarks" / "results"

QUICK_VARIABLE = "FASTDEPLOY_KVCACHE_BENCH_QUICK"
if "--quick" in sys.argv:
    os.environ[QUICK_VARIABLE] = "1"  # child processes inherit it
QUICK = os.environ.get(QUICK_VARIABLE) == "1"

TRACE_VARIABLE = "FASTDEPLOY_KVCACHE_BENCH_TRACE"
PUBLIC_TRACE = "https://github.com/kvcache-ai/Mooncake/raw/main/FAST25-release/traces/conversation_trace.jsonl"
PUBLIC_TRACE_SHA256 = "b8cbb061a85206d729d91cdc2981f43c9e0d99209dce588d3af5f7934408b9df"
"""Of its 12,031 lines."""

BEFORE_PROFILING = 144
"""Device blocks of a manager before FastDeploy has profiled: 8,192 batched tokens and eight requests."""

MOST_LOAD = 1.0

T = TypeVar("T")


def sized(full: T, quick: T) -> T:
    """Return `quick` in a quick run, else `full`."""
    return quick if QUICK else full


MODEL = ("--model", sized("smollm2", "random"))
"""A real model for servers whose first tokens are timed. The random one computes a checksum, which costs nothing."""


class Run:
    """One start of a benchmark: its options, and the state of tree and machine at that time."""

    def __init__(self, name: str, options: argparse.Namespace, command: str, *, is_timed: bool = True) -> None:
        self.name = name
        self._is_timed = is_timed
        self.options = options
        self._command = command
        self._commit, self._changes = git("rev-parse", "HEAD"), changed_files()
        self._load = os.getloadavg()[0]

    @property
    def refusal(self) -> str | None:
        """The reason why a result of this run would mislead, and the remedy."""
        otherwise = "or add --anyway, which marks the result"
        if self._changes:
            changes = ", ".join(self._changes[:3])
            return f"the tree has uncommitted changes ({changes}): commit or stash them, {otherwise}"
        if self._is_timed and self._load > MOST_LOAD:
            return f"the load average is {self._load:.2f}, expected at most {MOST_LOAD:g}: wait, {otherwise}"
        return None

    def save(self, measured: dict[str, Any]) -> None:
        """Write the result with its command, commit, machine and load, and print it."""
        result = {
            "benchmark": self.name,
            "command": self._command,
            "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "commit": self._commit,
            "clean": None if self._changes is None else not self._changes,
            "machine": machine(),
            "load": {"before": self._load, "after": os.getloadavg()[0]} if self._is_timed else None,
            **measured,
        }
        text = json.dumps(rounded(result), indent=2) + "\n"
        print(text, end="")
        if folder := self.options.results:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{self.name}.json").write_text(text, encoding="utf-8")


def begin(
    *,
    trace: bool = False,
    variables: Iterable[str] = (),
    configure: Callable[[argparse.ArgumentParser], None] | None = None,
) -> Run:
    """Parse the command line, and exit where the run is refused.

    `trace` adds `--trace`; `options.trace` is then a file in every case. `variables` are environment variables that
    belong to the command. `configure` adds options of the program.
    """
    program = Path(sys.argv[0])
    parser = argparse.ArgumentParser(prog=f"./scripts/bench {program.stem}", description=summary(program))
    parser.add_argument("--quick", action="store_true", help="tiny sizes, no figures: does the program work?")
    parser.add_argument("--anyway", action="store_true", help="run on a changed tree or a busy machine, and mark it")
    parser.add_argument("--results", type=Path, metavar="DIR", help="folder of the result")
    if trace:
        parser.add_argument(
            "--trace", type=Path, metavar="FILE", default=os.environ.get(TRACE_VARIABLE),
            help=f"request trace (default: ${TRACE_VARIABLE}, else generated traffic)",
        )  # fmt: skip
    if configure is not None:
        configure(parser)
    options = parser.parse_args()
    if trace:
        options.trace = usable_trace(options.trace)
    if options.results is None and not QUICK:
        options.results = RESULTS
    if trace and not any(word.startswith("--trace") for word in sys.argv):
        variables = [*variables, TRACE_VARIABLE]
    from programs import PROGRAMS  # which imports this module

    run = Run(program.stem, options, typed(program.stem, variables), is_timed=PROGRAMS[program.stem].is_timed)
    if run.refusal and not (options.anyway or QUICK):
        sys.exit(f"error: {run.refusal}")
    return run


def typed(name: str, variables: Iterable[str]) -> str:
    """The command as a person types it: paths of this machine by their last part."""
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    named = [f"{each}={Path(os.environ[each]).name}" for each in variables if os.environ.get(each)]
    return " ".join([*named, "./scripts/bench", name, *words])


def summary(program: Path) -> str:
    """The first paragraph of a program's docstring, as one line."""
    text = ast.get_docstring(ast.parse(program.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())


def usable_trace(path: Path | str | None) -> Path:
    """The named trace, or one of generated chats."""
    if path is None:
        return generated_trace("chat", sized(4_000, 200))
    if not Path(path).is_file():
        sys.exit(f"error: {path} is no file: name a trace in Mooncake's format, such as {PUBLIC_TRACE}")
    return Path(path)


def generated_trace(kind: str, requests: int, seed: int = 7) -> Path:
    """The file that `fastdeploy-kvcache traffic KIND --requests N --seed S` prints."""
    path = ROOT / "build" / "traces" / f"{kind}-{requests}-{seed}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = islice(KINDS[kind].lines(Source(seed), KINDS[kind].shape), requests)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def trace_name(path: Path) -> str:
    """The public trace by its checksum, any other by its file."""
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return "Mooncake conversations" if digest == PUBLIC_TRACE_SHA256 else f"{path.name}, sha256 {digest[:12]}"


def git(*arguments: str, root: Path = ROOT) -> str | None:
    """The output of a git command. None: no git, no repository, or a failure."""
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False)
    except OSError:
        return None
    return None if done.returncode else done.stdout.strip()


def changed_files() -> list[str] | None:
    """Tracked files with uncommitted changes, except those that benchmarks write. None without git."""
    written = (":!benchmarks/results", ":!docs/benchmarks.md")
    lines = git("status", "--porcelain", "--untracked-files=no", "--", ".", *written)
    return None if lines is None else [line.split()[-1] for line in lines.splitlines()]


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def percentile(values: Iterable[float], share: float) -> float:
    """NumPy's, which interpolates: 0.99 is the 99th percentile."""
    return float(np.quantile(list(values), share))


def median(values: Iterable[float]) -> float:
    return percentile(values, 0.5)


def rounded(value: Any) -> Any:
    """`value` with floats of four significant digits, which is more than any of these measurements has."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


def made_small(config: KVCacheConfig, clock: Callable[[], float] = time.monotonic) -> CacheManager:
    """A manager of `config`, made with `BEFORE_PROFILING` device blocks and resized, as FastDeploy does."""
    manager = CacheManager(replace(config, num_device_blocks=BEFORE_PROFILING), clock)
    manager.resize_device_pool(config.num_device_blocks)
    return manager


def random_tokens(seed: object, count: int) -> tuple[int, ...]:
    """`count` tokens that depend on the seed alone. Every tokenizer has their ids."""
    return tuple(random.Random(str(seed)).choices(range(97, 123), k=count))
