"""Start of one process of the server: `python -m ...cpu_worker.launch api|worker ARGUMENTS`.

The host runs both as scripts, where they are `__main__` and nothing could be changed in them before they run.
"""

from __future__ import annotations

import ctypes
import logging
import os
import runpy
import signal
import sys

from ..overlay import overlay
from ..overlay.table import Where
from . import activation
from .environment import run_directory
from .janitor import record_session

PR_SET_PDEATHSIG = 1
API_SERVER = "fastdeploy.entrypoints.openai.api_server"
SWITCH = "ENABLE_V1_KVCACHE_MANAGER"


def main() -> None:
    _die_with_parent()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    role, sys.argv = sys.argv[1], sys.argv[1:]
    if role == "worker":
        _prepare_math()
    else:
        record_session(run_directory())
    activation.start()
    if os.environ.get(SWITCH) == "1":
        overlay.start()
    if role == "worker":
        from fastdeploy.worker import worker_process

        activation.require_complete(Where.WORKER)
        worker_process.run_worker_proc()
    else:
        runpy.run_module(API_SERVER, run_name="__main__", alter_sys=True)


def _die_with_parent() -> None:
    """The supervisor's janitor ends what is left; this is for the time until it looks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _prepare_math() -> None:
    from ...model.reproducible import configure_reproducible_math

    os.environ.pop("OMP_NUM_THREADS", None)  # the host sets it for its GPU worker
    configure_reproducible_math()


if __name__ == "__main__":
    main()
