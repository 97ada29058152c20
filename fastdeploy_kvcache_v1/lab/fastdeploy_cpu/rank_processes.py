"""The worker processes of a tensor-parallel group, in the place of `paddle.distributed.launch`.

It starts one process for each rank with the variables by which Paddle's ranks find each other, over gloo, and ends
when the first of them does: what is left of the group cannot serve, and FastDeploy looks at this process only.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from ..model.ranks import rank_pipes
from . import RANK_PIPES
from .settings import free_ports

__all__ = ["run_ranks"]

POLL_S = 0.1
HOST = "127.0.0.1"


def run_ranks(command: Sequence[str], size: int, log_directory: Path) -> int:
    """Run `command` once for each rank, until one ends; the others are killed then. The first one's exit status, 1 if
    it was 0 or a signal: no rank ends by itself. What they print goes to `workerlog.N`; they share standard error.
    """
    ports = free_ports(HOST, *[0] * (size + 1))
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, pipes in enumerate(rank_pipes(size)):
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
    print(f"worker rank {rank} of {size} ended (status {status}): the others are ended, too", file=sys.stderr)
    return max(status, 1)


def rank_variables(rank: int, ports: Sequence[int]) -> dict[str, str]:
    """What Paddle reads. `ports` are one for each rank, and the one at which they meet."""
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
