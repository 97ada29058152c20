"""On the PYTHONPATH of a prefill server: a proxy stands before its worker's data plane, and peers read through it.

The file that `KVCACHE_TEST_FAULT` names holds the name of its fault, none while it is empty, and the rank that has it
unless all have.
"""

import os
import sys
from pathlib import Path


def stand_before_plane(fault_file: Path) -> None:
    import msgspec

    from fastdeploy_kvcache_v1.transfer.socket_plane import SocketPlane
    from tests.fault_proxy import Fault, FaultProxy

    own_rank = os.environ.get("PADDLE_TRAINER_ID", "0")

    class Proxy(FaultProxy):
        @property
        def fault(self):
            name, _, rank = fault_file.read_text().partition(" ")
            return Fault[name or "NONE"] if rank in ("", own_rank) else Fault.NONE

        @fault.setter
        def fault(self, fault):
            """The file says it."""

    own_address, proxies = SocketPlane.address, {}

    def address(plane):
        kind, host, port, name = msgspec.msgpack.decode(own_address(plane))
        if port not in proxies:
            proxies[port] = Proxy(port)
        return msgspec.msgpack.encode((kind, host, int(proxies[port].address.rpartition(":")[2]), name))

    SocketPlane.address = address


if "--engine_pid" in sys.orig_argv:  # a worker
    stand_before_plane(Path(os.environ["KVCACHE_TEST_FAULT"]))
