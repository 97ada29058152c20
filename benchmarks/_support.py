"""What every benchmark shares: the machine's description, percentiles, and where results go."""

from __future__ import annotations

import json
import os
import platform
import random
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # some take what tests/ has
RESULTS = ROOT / "benchmarks" / "results"
TRACE = ROOT.parent / "shared/traces/mooncake_conversation.jsonl"
MODEL = ("--model", "smollm2")
"""For servers whose first tokens are timed: a real model. The random one computes a checksum, which costs nothing."""


BEFORE_PROFILING = 144
"""Device blocks of a manager when FastDeploy makes it, for batches of 8,192 tokens and eight requests at once. It is
resized when profiling has found how many there are; so are those that are measured.
"""


def made_small(config: KVCacheConfig) -> CacheManager:
    """A manager of `config` that was made so, and resized."""
    manager = CacheManager(replace(config, num_device_blocks=BEFORE_PROFILING))
    manager.resize_device_pool(config.num_device_blocks)
    return manager


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def percentile(values: Iterable[float], share: float) -> float:
    """Nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Iterable[float]) -> float:
    return percentile(values, 0.5)


def save(name: str, measured: dict[str, Any]) -> None:
    """Write `results/{name}.json` and print what was measured."""
    result = {
        "benchmark": name,
        "when": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": commit(),
        "machine": machine(),
        **measured,
    }
    RESULTS.mkdir(parents=True, exist_ok=True)
    text = json.dumps(rounded(result), indent=2)
    (RESULTS / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def commit(checkout: Path = ROOT) -> str | None:
    """None where there is no git."""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None
    except OSError:
        return None


def rounded(value: Any) -> Any:
    """Four significant digits are more than any of these measurements has."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return value


def random_tokens(seed: object, count: int) -> tuple[int, ...]:
    """The same `count` tokens for the same seed, always. Every tokenizer has their ids."""
    return tuple(random.Random(str(seed)).choices(range(97, 123), k=count))


def need_trace() -> Path:
    """The trace named on the command line, or the one beside the checkout."""
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else TRACE
    if not path.is_file():
        sys.exit(f"error: no trace at {path}: name one as the first argument")
    return path
