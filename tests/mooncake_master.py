"""A real Mooncake master for tests, on free ports of the loopback interface; and whether there can be one."""

from __future__ import annotations

import functools
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

LIMIT_S = 60.0
LIBRARIES = "libibverbs1 libnuma1 libcurl4 librdmacm1 liburing2"
PROGRAM = Path(sys.executable).with_name("mooncake_master")
SEGMENT_BYTES = 64 << 20
"""Mooncake allocates in slabs of 4 MiB."""


@functools.cache
def _why_not() -> str | None:
    if importlib.util.find_spec("mooncake") is None:
        return "mooncake is not installed: pip install -e '.[mooncake]'"
    loaded = subprocess.run(
        [sys.executable, "-c", "import mooncake.store, mooncake.engine"], capture_output=True, text=True
    )
    if loaded.returncode:
        return f"mooncake cannot be loaded ({loaded.stderr.strip().splitlines()[-1]}): apt-get install {LIBRARIES}"
    missing = subprocess.run([PROGRAM, "--version"], capture_output=True, text=True)
    if "error while loading shared libraries" in missing.stderr:
        return f"mooncake_master: {missing.stderr.strip()}: apt-get install {LIBRARIES}"
    return None


def needs_mooncake() -> pytest.MarkDecorator:
    """Skips where there is no Mooncake, and says what to install."""
    reason = _why_not()
    return pytest.mark.skipif(reason is not None, reason=reason or "")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Master:
    """`mooncake_master` in its own process, which can be stopped, killed, and started again at the same address."""

    def __init__(self, directory: Path, *flags: str) -> None:
        self.port = free_port()
        self._flags = flags
        self._log = directory / "master.log"
        self.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def environment(self, address: str | None = None, segment_bytes: int = SEGMENT_BYTES) -> dict[str, str]:
        """What tells a server where the master is; `address` of a proxy in front of it."""
        return {
            "MOONCAKE_CONFIG_PATH": "",
            "MOONCAKE_MASTER_SERVER_ADDR": address or self.address,
            "MOONCAKE_METADATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(segment_bytes),
        }

    def start(self) -> None:
        """Returns when it answers. It forgets what was stored before."""
        rpc = ("-rpc_address=127.0.0.1", f"-rpc_port={self.port}")
        metrics = ("-metrics_host=127.0.0.1", f"-metrics_port={free_port()}")
        with self._log.open("ab") as log:
            self.process = subprocess.Popen([PROGRAM, *rpc, *metrics, *self._flags], stdout=log, stderr=log)
        deadline = time.monotonic() + LIMIT_S
        while True:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1.0).close()
                return
            except OSError:
                assert self.process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline, "the master does not answer"
                time.sleep(0.02)

    def freeze(self) -> None:
        """Returns when it stands still."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
