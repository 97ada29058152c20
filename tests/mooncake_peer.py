"""Proxies in front of the ports of a server's Mooncake clients, which other servers read stored blocks from.

Mooncake chooses these ports, listens on every address, and tells others its host name and port. A preloaded library
keeps it to 127.0.0.1; its host name is another address of the loopback interface, where the proxies have its ports.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.fault_proxy import Fault, FaultProxy

HOST = "127.0.0.2"
SOURCE = Path(__file__).with_name("bind_to_loopback.c")


def needs_compiler() -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler (cc)")


def environment(directory: Path) -> dict[str, str]:
    """Of a server that is reached through proxies only. What is compiled goes to `directory`."""
    library = directory / "bind_to_loopback.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, SOURCE, "-ldl"], check=True)
    return {"LD_PRELOAD": str(library), "MOONCAKE_LOCAL_HOSTNAME": HOST}


class PeerProxies:
    """In front of all that listens now."""

    def __init__(self, server: psutil.Process) -> None:
        self._proxies = [FaultProxy(port, (HOST, port)) for port in _ports(server)]

    def __len__(self) -> int:
        return len(self._proxies)

    def set_fault(self, fault: Fault) -> None:
        for proxy in self._proxies:
            proxy.fault = fault

    @property
    def faults_met(self) -> int:
        return sum(proxy.faults_met for proxy in self._proxies)

    def close(self) -> None:
        for proxy in self._proxies:
            proxy.close()


def _ports(server: psutil.Process) -> list[int]:
    clients = [child for child in server.children(recursive=True) if any("mooncake" in word for word in _words(child))]
    return [port for client in clients for port in _listens_at(client)]


def _listens_at(process: psutil.Process) -> list[int]:
    try:
        connections = process.net_connections("tcp")
    except psutil.Error:  # as in `_words`
        return []
    return [connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN]


def _words(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has just ended: a client that could not be used
        return []
