"""Child processes that end with their parent, or on request."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time

PR_SET_PDEATHSIG = 1
PARENT_POLL_S = 1.0


def die_with_parent_thread(number: int = signal.SIGKILL) -> None:
    """Have the kernel send `number` when the thread that started this process ends. Linux only."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def die_with_parent(parent_pid: int) -> None:
    """`die_with_parent_thread`, and a thread that checks the parent in case the kernel does not."""
    die_with_parent_thread()

    def watch() -> None:
        while os.getppid() == parent_pid:
            time.sleep(PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def end_process(process: subprocess.Popen[bytes], grace_s: float) -> None:
    """Send SIGINT, kill it after `grace_s` seconds, and wait for its end."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(grace_s)
        except subprocess.TimeoutExpired:
            process.kill()
    process.wait()
