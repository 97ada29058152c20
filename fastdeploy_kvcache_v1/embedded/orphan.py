"""A helper process must not outlive the server that started it."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 1.0


def die_with_parent(parent_pid: int) -> None:
    """Leave no orphan: the kernel kills us with the thread that started us, and a thread of ours looks in case the
    kernel cannot.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()
