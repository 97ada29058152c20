"""Subtle faults in production code (`tests/world/mutants.txt`), and the hunt for each: which seed finds it.

`python -m tests.mutation.hunt [NAME ...]` runs each mutant in a process of its own, the fixed seeds of the first tier
first, and prints the seed that found it. `--of FILE`: those of another file. Those that name tests need a NAME.
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from pathlib import Path

from .changes import Change, read
from .replaced import load_from

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "fastdeploy_kvcache_v1"
LIST = ROOT / "tests" / "world" / "mutants.txt"
MUTANTS = read(LIST)


def hunt(mutant: Change, seeds: int, events: int) -> int:
    path = SOURCES / mutant.file
    load_from(path, mutant.applied_to(path.read_text(encoding="utf-8")))
    from tests.world.scenarios import SCENARIOS
    from tests.world.world import KEPT, Run, line, try_run

    by_seed = (Run(scenario, seed, range(events)) for seed in range(seeds) for scenario in SCENARIOS)
    for run in itertools.chain(KEPT, by_seed):
        result = try_run(run)
        if result.error is not None:
            print(f"{mutant.name}: seed {run.seed}: {result.error[:110]}\n    {line(run)}", flush=True)
            return 0
    print(f"{mutant.name}: SURVIVES {seeds} seeds", flush=True)
    return 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutation.hunt")
    parser.add_argument("names", nargs="*", help="part of a name; all without")
    parser.add_argument("--seeds", type=int, default=1000)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--of", type=Path, default=LIST, metavar="FILE")
    parser.add_argument("--here", action="store_true", help="in this process, which is of no use afterwards")
    chosen = parser.parse_args()
    mutants = [
        each
        for each in read(chosen.of)
        if (any(name in each.name for name in chosen.names) if chosen.names else not each.tests)
    ]
    if chosen.here:
        return hunt(mutants[0], chosen.seeds, chosen.events)
    command = [sys.executable, "-m", "tests.mutation.hunt", "--here", f"--of={chosen.of}", f"--seeds={chosen.seeds}"]
    survivors = [
        subprocess.run([*command, f"--events={chosen.events}", "--", each.name], check=False).returncode
        for each in mutants
    ]
    print(f"{len(mutants) - sum(map(bool, survivors))} of {len(mutants)} found")
    return 1 if any(survivors) else 0


if __name__ == "__main__":
    sys.exit(main())
