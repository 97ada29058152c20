"""The worker processes of all tensor-parallel groups, in place of `paddle.distributed.launch`.

Each rank gets the variables by which Paddle's ranks find each other, over gloo. When one ends, all end: the others
cannot serve, and FastDeploy watches this process only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from ..model.ranks import rank_pipes
from . import RANK_PIPES
from .settings import free_ports

__all__ = ["run_ranks"]

POLL_S = 0.1
HOST = "127.0.0.1"


def run_ranks(command: Sequence[str], size: int, log_directory: Path, *, group: int | None = None) -> int:
    """Run `command` for each rank until one ends, then kill the others. Returns its exit status, 1 for 0 or a signal.

    Output goes to `workerlog.N`; standard error is shared. Only ranks of one `group` (all by default) compute together.
    """
    group = group or size
    ports = free_ports(HOST, *[0] * (size + 1))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, pipes in enumerate(chain.from_iterable(rank_pipes(group) for _ in range(size // group))):
            inherited = [each.fileno() for each in pipes]
            environment = {**os.environ, **rank_variables(rank, ports), RANK_PIPES: " ".join(map(str, inherited))}
            with (log_directory / f"workerlog.{rank}").open("wb") as output:
                processes.append(subprocess.Popen(command, stdout=output, env=environment, pass_fds=inherited))
            for each in pipes:
                each.close()
        rank, status = _first_to_end(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    print(f"worker rank {rank} of {size} ended (status {status}): the other ranks were ended too", file=sys.stderr)
    return max(status, 1)


def rank_variables(rank: int, ports: Sequence[int]) -> dict[str, str]:
    """Variables for Paddle. `ports`: one for each rank, then the meeting port."""
    *own, meeting = (f"{HOST}:{port}" for port in ports)
    return {
        "PADDLE_DISTRI_BACKEND": "gloo",
        "PADDLE_TRAINER_ID": str(rank),
        "PADDLE_TRAINERS_NUM": str(len(own)),
        "PADDLE_TRAINER_ENDPOINTS": ",".join(own),
        "PADDLE_CURRENT_ENDPOINT": own[rank],
        "PADDLE_MASTER": meeting,
        "PADDLE_RANK_IN_NODE": str(rank),
        "PADDLE_LOCAL_SIZE": str(len(own)),
    }


def _first_to_end(processes: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int]:
    while True:
        for rank, process in enumerate(processes):
            if (status := process.poll()) is not None:
                return rank, status
        time.sleep(POLL_S)
