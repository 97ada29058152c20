"""CPU time per request of this checkout over another one's, to judge a change of the scheduler half.
Each plays the same trace with its own `control_plane.Managed`, in a process of its own, in turns of 250 requests.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import subprocess
import sys
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
KINDS = {
    "one tier, 5,000 blocks": (5_000, 0, "write_back"),
    "one tier, 20,000 blocks": (20_000, 0, "write_back"),
    "one tier, 40,000 blocks": (40_000, 0, "write_back"),
    "two tiers, write_through": (20_000, 80_000, "write_through"),
    "two tiers, write_through_selective": (20_000, 80_000, "write_through_selective"),
    "two tiers, write_back": (20_000, 80_000, "write_back"),
}
TURN = 250


def play(address: str) -> None:
    """Play ranges of requests on demand, and answer with the seconds of each. Runs in a child process."""
    import gc
    from time import thread_time

    import control_plane

    control_plane.Managed.clock = staticmethod(thread_time)
    requests = control_plane.load(Path(sys.argv[1]))
    gc.collect()
    gc.freeze()
    contenders: dict[str, control_plane.Managed] = {}
    with Client(address) as connection:
        connection.send(len(requests))
        while (order := connection.recv()) is not None:
            kind, first, last = order
            if kind not in contenders or not first:
                device, host, policy = KINDS[kind]
                contenders[kind] = control_plane.Managed(device, host, policy=policy)
            contender = contenders[kind]
            done = len(contender.seconds)
            for request in requests[first:last]:
                contender.play(request)
            connection.send((contender.seconds[done:], contender.step_seconds[done:]))


def start(root: Path, trace: Path, listener: Listener) -> tuple[Connection[Any, Any], int]:
    environment = {
        **os.environ,
        "PYTHONPATH": f"{root}{os.pathsep}{root / 'benchmarks'}",
        "PYTHONSAFEPATH": "1",  # keeps the folder of this script out
        "FASTDEPLOY_KVCACHE_PLAYER": listener.address,
    }
    subprocess.run([sys.executable, "-c", "import control_plane"], env=environment, check=True)
    subprocess.Popen([sys.executable, __file__, str(trace)], env=environment)
    connection = listener.accept()
    return connection, connection.recv()


def main() -> None:
    from _support import begin, median, percentile, rounded, sized, trace_name

    def configure(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("other", type=Path, metavar="DIR", help="the other checkout")

    options = begin(trace=True, configure=configure).options
    other, trace, rounds = options.other.resolve(), options.trace.resolve(), sized(2, 1)
    seconds: dict[str, dict[str, list[float]]] = {kind: {"this": [], "other": []} for kind in KINDS}
    steps: dict[str, dict[str, list[float]]] = {kind: {"this": [], "other": []} for kind in KINDS}
    with Listener(family="AF_UNIX") as listener:
        players = {name: start(root, trace, listener) for name, root in (("this", HERE.parent), ("other", other))}
        count = players["this"][1]
        for round_number in range(rounds):
            for first in range(0, count, TURN):
                names = ["this", "other"] if (first // TURN + round_number) % 2 else ["other", "this"]
                for kind in KINDS:
                    for name in names:
                        connection = players[name][0]
                        connection.send((kind, first, first + TURN))
                        request_seconds, step_seconds = connection.recv()
                        seconds[kind][name] += request_seconds
                        steps[kind][name] += step_seconds
        for connection, _ in players.values():
            connection.send(None)
    rows = {}
    for kind, both in seconds.items():

        def both_medians(name: str, kind: str = kind) -> float:
            return median(map(operator.add, seconds[kind][name], steps[kind][name]))

        rows[kind] = {
            name: {"median_us": 1e6 * median(values), "p99_us": 1e6 * percentile(values, 0.99)}
            for name, values in both.items()
        }
        rows[kind]["ratio"] = {
            "median": median(both["this"]) / median(both["other"]),
            "mean": sum(both["this"]) / sum(both["other"]),
            "step_median": median(steps[kind]["this"]) / median(steps[kind]["other"]),
            "request_and_step_median": both_medians("this") / both_medians("other"),
        }
    print(json.dumps(rounded({"trace": trace_name(trace), "requests": count, "rows": rows}), indent=2))


if __name__ == "__main__":
    if address := os.environ.get("FASTDEPLOY_KVCACHE_PLAYER"):
        play(address)
    else:
        main()
