"""Start of one process of the server: `python -m ...fastdeploy_cpu.launch api|servers|worker ARGUMENTS`.

FastDeploy runs them as scripts, which cannot be patched before they run. `servers` starts `api` for each data parallel
engine. `launch ranks SIZE GROUP LOG_DIRECTORY ARGUMENTS` starts `launch worker ARGUMENTS` for each rank.
"""

from __future__ import annotations

import logging
import os
import runpy
import sys
from pathlib import Path

from ...fastdeploy_integration.overlay import overlay
from ...fastdeploy_integration.overlay.table import Where
from ...switch import is_enabled, say_refusals_alone
from ..child_processes import die_with_parent_thread
from . import activation
from .rank_processes import run_ranks

API_SERVER = "fastdeploy.entrypoints.openai.api_server"


def main() -> None:
    die_with_parent_thread()  # until the supervisor ends leftover processes
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    role, sys.argv = sys.argv[1], sys.argv[1:]
    if role == "ranks":
        _, size, group, log_directory, *arguments = sys.argv
        command = [sys.executable, "-u", "-m", __spec__.name, "worker", *arguments]
        sys.exit(run_ranks(command, int(size), Path(log_directory), group=int(group)))
    if role == "worker":
        _prepare_math()
    say_refusals_alone()
    activation.start()
    if is_enabled():
        overlay.start()
    if role == "worker":
        from fastdeploy.worker import worker_process

        activation.require_complete(Where.WORKER)
        worker_process.run_worker_proc()
    elif role == "servers":
        from fastdeploy.entrypoints.openai import multi_api_server

        multi_api_server.main()
    else:
        runpy.run_module(API_SERVER, run_name="__main__", alter_sys=True)


def _prepare_math() -> None:
    from ..model.reproducible import configure_reproducible_math, default_threads

    os.environ.pop("OMP_NUM_THREADS", None)  # FastDeploy sets it for its GPU worker
    configure_reproducible_math(default_threads())


if __name__ == "__main__":
    main()
