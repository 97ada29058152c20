"""Shares of tokens that hit, and blocks copied to the host, by write and eviction policy and by size of the tiers.
Each table is a `fastdeploy-kvcache replay --compare` of the trace or of generated traffic, and depends on no load.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _support import begin, generated_trace, sized, trace_name

from fastdeploy_kvcache_v1.lab.traffic import KINDS

GENERATED = sized(4_000, 100)
TRAFFIC = sized(tuple(KINDS), ("chat",))

WRITE = ("--device-blocks", sized("5000,20000", "2000"), "--host-blocks", sized("20000,80000", "2000"))
SHORT_HOST = (
    *("--device-blocks", sized("2000,4000", "2000"), "--host-blocks", sized("500,2000,8000", "500")),
    *("--policies", "auto,write_back,adaptive,lru", "--window", "8", "--admissions-per-step", "1"),
)
ONE_TIER = ("--host-blocks", "0", "--window", "1", "--device-blocks")


def compare(trace: Path, name: str, flags: tuple[str, ...]) -> list[dict[str, Any]]:
    """One case per capacity."""
    command = [sys.executable, "-m", "fastdeploy_kvcache_v1.cli", "replay", str(trace), "--compare", "--json", *flags]
    found = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return [{"traffic": name, **case(capacity)} for capacity in found["capacities"]]


def case(capacity: dict[str, Any]) -> dict[str, Any]:
    kept = ("device_blocks", "host_blocks", "requests", "clairvoyant", "one_lru_tier")
    runs = [
        {
            "write_policy": run["options"]["write_policy"],
            "eviction_policy": run["options"]["eviction_policy"],
            "hit_share": run["hit_rate"]["total"],
            "blocks_out": run["blocks_swapped_out"],
            "blocks_in": run["blocks_swapped_in"],
        }
        for run in capacity["runs"]
    ]
    return {**{key: capacity[key] for key in kept}, "runs": runs}


def main() -> None:
    run = begin(trace=True)
    trace, name = run.options.trace, trace_name(run.options.trace)
    one_tier = compare(trace, name, (*ONE_TIER, sized("1000,5000,20000,40000", "2000")))
    for kind in TRAFFIC:
        one_tier += compare(generated_trace(kind, GENERATED), kind, (*ONE_TIER, sized("1000,4000,16000", "2000")))
    tables = {
        "Write policies": compare(trace, name, WRITE),
        "Short host tiers": compare(generated_trace("agents", GENERATED), "agents", SHORT_HOST),
        "Eviction policies": one_tier,
    }
    run.save({"trace": name, "tables": tables})


if __name__ == "__main__":
    main()
