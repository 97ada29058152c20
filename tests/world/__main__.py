"""python -m tests.world SCENARIO --seed N: run it, and say what is wrong with it."""

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
    parser = argparse.ArgumentParser(prog="python -m tests.world")
    parser.add_argument("scenario", choices=sorted(SCENARIOS))
    parser.add_argument("--seed", "--seeds", default="0-9", help="such as 12, or 0-99", type=numbers)
    parser.add_argument("--events", type=int, default=500)
    parser.add_argument("--tickets", help="only these of them, such as 3,7,12-40")
    parser.add_argument("--off", default="", help="faults that do not happen, separated by commas")
    parser.add_argument("--size", action="append", default=[], metavar="NAME=N", help="instead of the drawn one")
    parser.add_argument("--check-every", type=int, default=10)
    parser.add_argument("--shrink", action="store_true", help="of the first seed that fails")
    parser.add_argument("--trace", action="store_true", help="print what happens, though nothing is wrong")
    chosen = parser.parse_args(arguments)
    tickets = numbers(chosen.tickets) if chosen.tickets else range(chosen.events)
    off = frozenset(filter(None, chosen.off.split(",")))
    sizes = {name: int(size) for name, size in (each.split("=") for each in chosen.size)}
    failed, requests, faults = 0, 0, Counter[str]()
    for seed in chosen.seed:
        run = Run(chosen.scenario, seed, tickets, off, sizes, chosen.check_every)
        result = try_run(run)
        if result.error is None:
            ended, _, happened = map(dict, result.outcome)
            requests += sum(ended.values())
            faults.update(happened)
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
    met = ", ".join(f"{name}: {count}" for name, count in faults.most_common() if count)
    print(
        f"{len(chosen.seed) - failed} of {len(chosen.seed)} runs of {len(tickets)} events kept every law. "
        f"{requests} requests ended, {faults.total()} faults happened{f' ({met})' if met else ''}."
    )
    return 1 if failed else 0


if __name__ == "__main__":
    if find_spec("fastdeploy") is not None:  # its own hosts have scenarios, too
        from . import real_host  # noqa: F401
    sys.exit(main())
