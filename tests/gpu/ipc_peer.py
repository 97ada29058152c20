"""A prefill worker's GPU memory in a process of its own, and the checks' end of its pipes.

As a program it answers what it is asked on its standard input: `(method, *arguments)` of a `PeerWorker`, pickled.
"""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import cupy
from plane_contract import GpuTensors, content

from fastdeploy_kvcache_v1.transfer.cuda_ipc_plane import CudaIpcPlane


class PeerWorker:
    """Whatever it is asked; its answers go back."""

    def __init__(self, seed: int) -> None:
        self.tensors: GpuTensors | None = GpuTensors(content(seed))
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.plane = CudaIpcPlane()
        self.plane.register(self.tensors.rows())

    def address(self) -> bytes:
        return self.plane.address()

    def compute(self, block: int, value: int) -> None:
        """As a forward pass: on a stream of its own, and said to be done when its event has passed."""
        assert self.tensors is not None
        with self.stream:
            for each in self.tensors.arrays:
                each[block].fill(value)
            event = self.stream.record()
        while not event.done:
            pass

    def leave(self, seconds: float) -> None:
        """Close the plane, waiting so long for its readers, and free the tensors."""
        from fastdeploy_kvcache_v1.transfer import cuda_ipc_plane

        cuda_ipc_plane.READERS_LEAVE_S = seconds
        self.plane.close()
        self.tensors = None


class Peer:
    """The process. `ask` waits for the answer, `tell` and `hear` are its halves."""

    def __init__(self, seed: int = 1) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), str(seed)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.address: bytes = self.hear()

    def tell(self, *message: Any) -> None:
        assert self.process.stdin is not None
        pickle.dump(message, self.process.stdin)
        self.process.stdin.flush()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return pickle.load(self.process.stdout)

    def ask(self, *message: Any) -> Any:
        self.tell(*message)
        return self.hear()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


def answer(worker: PeerWorker) -> None:
    """Until nobody asks any more. The first answer is its address."""
    out = sys.stdout.buffer
    pickle.dump(worker.address(), out)
    out.flush()
    while True:
        try:
            name, *arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(getattr(worker, name)(*arguments), out)
        out.flush()


if __name__ == "__main__":
    answer(PeerWorker(int(sys.argv[1])))
