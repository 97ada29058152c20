"""A file store for store processes, which does what the file `faults` in its directory says. See `StoreHost`."""

import json
import subprocess
import sys
import time
from pathlib import Path

from fastdeploy_kvcache_v1.errors import StorageError
from fastdeploy_kvcache_v1.storage.base import StorageFullError
from fastdeploy_kvcache_v1.storage.file.file_backend import FileBackend
from fastdeploy_kvcache_v1.storage.registry import StoreKind

WRITER = """
import mmap, os, pathlib, sys, time
memory = mmap.mmap(int(sys.argv[1]), int(sys.argv[2]))
pathlib.Path(sys.argv[3], f"writer-{os.getpid()}").touch()
end = time.monotonic() + 100
while time.monotonic() < end:
    memory[-1] = (memory[-1] + 1) % 256
"""


class FaultyBackend(FileBackend):
    """Each call is a line of the file `calls`: what, and which keys."""

    def register(self, memory):
        """With the fault `child`, another process maps the memory, and writes into its last slot for ever."""
        if "child" in self._faults:
            kept = [memory.file, memory.life]
            command = [sys.executable, "-c", WRITER, str(memory.file), str(len(memory.view)), str(self.beside)]
            started = subprocess.Popen(command, pass_fds=kept, start_new_session=self._faults["child"] == "escapes")
            while not (self.beside / f"writer-{started.pid}").exists():
                time.sleep(0.005)

    def __init__(self, chosen, namespace):
        self.beside = Path(chosen.options["kvcache_storage_dir"])
        self._act("open", ())
        super().__init__(self.beside / "kv", namespace, capacity_bytes=10 << 30)

    @property
    def may_write_late(self):
        return self._faults.get("late", False)

    def count_stored(self, keys):
        self._act("count_stored", keys)
        return super().count_stored(keys)

    def get(self, keys, buffers):
        self._act("get", keys)
        return super().get(keys, buffers)

    def put(self, keys, buffers):
        self._act("put", keys)
        return super().put(keys, buffers)

    @property
    def _faults(self):
        try:
            return json.loads((self.beside / "faults").read_text())
        except (FileNotFoundError, ValueError):
            return {}

    def _act(self, what, keys):
        with (self.beside / "calls").open("a") as file:
            file.write(json.dumps([what, list(keys)]) + "\n")
        while (fault := self._faults.get(what)) == "hang":
            time.sleep(0.005)
        if fault == "full":
            raise StorageFullError(0, len(keys))
        if fault == "bug":
            raise RuntimeError("a bug")
        if fault is not None:
            raise StorageError(fault)


STORE = StoreKind(
    "faulty", open=lambda chosen, namespace: FaultyBackend(chosen, namespace), check=print, load_threads=2
)
