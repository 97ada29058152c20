"""`bench serve` on a real model, cache on against cache off: `python benchmarks/serve_workloads.py MODEL_DIRECTORY`.

Each workload of the command, closed loop, and one of them again with Poisson arrival at half the rate that the server
without a cache reached: there the time to the first token is not waiting in line.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from _support import save

from fastdeploy_kvcache_v1.bench_serve.workloads import WORKLOADS

REQUESTS = 24
SIZE = ("--requests", str(REQUESTS), "--max-prompt-tokens", "800", "--max-output-tokens", "16", "--concurrency", "2")
SERVE = ("--num-gpu-blocks-override", "96", "--swap-space", "1", "--max-model-len", "1024")
POISSON = "documents"


def measure(model: Path, workload: str, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "fastdeploy_kvcache_v1.cli", "bench", "serve", "--json", "--workload", workload]
    serve = ["--", "--embedded", "--model", str(model), *SERVE]
    done = subprocess.run([*command, *SIZE, *options, *serve], stdout=subprocess.PIPE, text=True, check=False)
    result: dict[str, Any] = json.loads(done.stdout)
    print(f"{workload}: {result.get('verdict') or result['problems']}", file=sys.stderr)
    return result


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("error: name a Hugging Face model directory")
    model = Path(sys.argv[1])
    results = {workload: measure(model, workload) for workload in WORKLOADS}
    rate = results[POISSON]["runs"]["cache off"]["requests_per_s"] / 2
    results[f"{POISSON}, Poisson arrival"] = {"rate": rate, **measure(model, POISSON, "--rate", f"{rate:.4f}")}
    save("serve_workloads", {"model": model.name, "workloads": results})


if __name__ == "__main__":
    main()
