"""python -m tests.world [SCENARIO ...] --seeds 0-9: run simulated servers, and report every broken law."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec

from .chance import numbers
from .scenarios import SCENARIOS
from .world import Run, line, shrink, try_run


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parse(arguments)
    num_failed = 0
    for scenario in chosen.scenarios:
        failed = report(scenario, chosen)
        num_failed += failed
        if failed and chosen.shrink:
            break
    if len(chosen.scenarios) > 1:
        print(f"{len(chosen.scenarios)} scenarios: {num_failed or 'no'} run{'s' * (num_failed != 1)} broke a law")
    return 1 if num_failed else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.world",
        description="Simulate a server with clients, workers, stores and faults. tests/world/README.md explains it.",
        epilog=f"scenarios: {', '.join(sorted(SCENARIOS))}",
    )
    parser.add_argument("scenarios", nargs="*", metavar="SCENARIO", help="default: all, listed below")
    parser.add_argument("--seed", "--seeds", default="0-9", help="such as 12, or 0-99 (default: 0-9)", type=numbers)
    parser.add_argument("--events", type=int, default=500, help="events of a run (default: 500)")
    parser.add_argument("--tickets", help="only these events, such as 3,7,12-40")
    parser.add_argument("--off", default="", help="faults to switch off, separated by commas")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", help="set a drawn size")
    parser.add_argument("--check-every", type=int, default=10, help="events between two checks (default: 10)")
    parser.add_argument("--shrink", action="store_true", help="reduce the first failing run")
    parser.add_argument("--trace", action="store_true", help="print the events of every run")
    chosen = parser.parse_args(arguments)
    unknown = set(chosen.scenarios) - set(SCENARIOS)
    if unknown:
        parser.error(f"unknown scenario {', '.join(map(repr, sorted(unknown)))}: choose among {', '.join(SCENARIOS)}")
    chosen.scenarios = chosen.scenarios or list(SCENARIOS)
    chosen.tickets = numbers(chosen.tickets) if chosen.tickets else range(chosen.events)
    chosen.off = frozenset(filter(None, chosen.off.split(",")))
    chosen.size = {name: int(size) for name, size in (each.split("=") for each in chosen.size)}
    chosen.check_every = 1 if chosen.trace else chosen.check_every
    return chosen


def report(scenario: str, chosen: argparse.Namespace) -> int:
    """Run every seed and print the summary. Returns the number of runs that failed."""
    failed, ends, faults, checks = 0, Counter[str](), Counter[str](), Counter[str]()
    for seed in chosen.seed:
        run = Run(scenario, seed, chosen.tickets, chosen.off, chosen.size, chosen.check_every)
        result = try_run(run)
        if result.error is None:
            for total, at in ((ends, 0), (faults, 2), (checks, 3)):
                total.update(dict(result.outcome[at]))
            print(*(result.trace if chosen.trace else ()), sep="\n", end="\n" * chosen.trace)
            continue
        failed += 1
        print(f"{result.error}\n  {line(run)}", flush=True)
        if chosen.shrink:
            smallest = shrink(run)
            final = try_run(smallest._replace(check_every=1))
            print(*final.trace, f"{final.error}\n  {line(smallest)}", sep="\n")
            break
        if len(chosen.seed) == 1:
            print(*result.trace, sep="\n")
    print(summary(scenario, chosen, failed, ends, faults, checks), flush=True)
    return failed


def summary(
    scenario: str,
    chosen: argparse.Namespace,
    failed: int,
    ends: Counter[str],
    faults: Counter[str],
    checks: Counter[str],
) -> str:
    runs = len(chosen.seed)
    if failed:
        laws = f"broken in {failed} of {runs} run{'s' * (runs != 1)}: the command below each error replays it"
    else:
        laws = (
            f"all held: {checks['tokens']:,} tokens and {checks['positions']:,} cache reads compared, "
            f"{checks['checks']:,} checks of the whole cache"
        )
    return (
        f"{scenario}: {runs} run{'s' * (runs != 1)} of {len(chosen.tickets)} event{'s' * (len(chosen.tickets) != 1)}\n"
        f"  requests  {listed(ends)}\n"
        f"  faults    {listed(faults)}\n"
        f"  laws      {laws}"
    )


def listed(counts: Counter[str]) -> str:
    parts = ", ".join(f"{name} {count:,}" for name, count in counts.most_common() if count)
    return f"{counts.total():,}" + (f" ({parts})" if parts else "")


if __name__ == "__main__":
    if find_spec("fastdeploy") is not None:  # scenarios with FastDeploy's own classes
        from . import real_host  # noqa: F401
    sys.exit(main())
