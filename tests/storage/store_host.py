"""StoreHost: what an engine and its ranks are for a store process: memory, answers, faults of the store, signals."""

from __future__ import annotations

import io
import json
import mmap
import os
import queue
import signal
import time

from fastdeploy_kvcache_v1.storage import registry
from fastdeploy_kvcache_v1.storage.parts import Parts
from fastdeploy_kvcache_v1.storage.process import Limits, StoreProcess
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.storage import added_store
from tests.storage.values import BLOCK_BYTES, VALUE_BYTES, block_hash, file_options, namespace

LIMIT_S = 60.0
NUM_SLOTS = 16
DEFAULT = Limits()


def install(directory, monkeypatch):
    """The store `faulty` can be named, here and in processes that start from here on."""
    added_store.install(directory, "faulty", faulty="tests.storage.faulty:STORE")
    monkeypatch.syspath_prepend(directory)
    forget_kinds()


def forget_kinds():
    for cached in (registry._added, registry.store_kind):
        cached.cache_clear()


def hashes(numbers):
    return [block_hash(number) for number in numbers]


class StoreHost:
    """Blocks are numbers, and so are slots. `heads`: of the model, see `Parts.of`."""

    def __init__(self, directory, *, ranks=1, heads=None, limits=DEFAULT, backend="faulty", starts=True):
        self.directory = directory
        directory.mkdir(exist_ok=True)
        self.answers = queue.SimpleQueue()
        self.events = []
        settings = StorageSettings(backend, file_options(directory))
        self.parts = Parts.of(ranks, heads)
        self.process = StoreProcess(settings, self.parts, limits=limits)
        self.process.listen(self._heard)
        self.memories = {}
        if starts:
            for rank in range(ranks):
                self.use_memory(rank)
            self.process.use_namespace(namespace())
            self.wait_until_it_serves()

    def _heard(self, answer):
        self.events.append(answer)
        self.answers.put(answer)

    def use_memory(self, rank):
        file = os.memfd_create("test-host")
        os.ftruncate(file, NUM_SLOTS * VALUE_BYTES)
        self.memories[rank] = mmap.mmap(file, NUM_SLOTS * VALUE_BYTES)
        self.process.use_memory(rank, io.FileIO(file), NUM_SLOTS, VALUE_BYTES)

    def wait_until_it_serves(self):
        self.wait_until(lambda: self.process.is_serving)

    def wait_until(self, happens):
        deadline = time.monotonic() + LIMIT_S
        while not happens():
            assert time.monotonic() < deadline, "it never happens"
            time.sleep(0.002)

    # ---- memory: block `number` has other bytes on each part

    def content(self, rank, number):
        part = next(part for part in range(self.parts.num_parts) if rank in self.parts.holders(part))
        return bytes([16 * part + number + 1]) * BLOCK_BYTES

    def fill(self, numbers, *, at=0):
        """Block `number` to slot `at + number` of every rank."""
        for rank, memory in self.memories.items():
            for number in numbers:
                begin = (at + number) * VALUE_BYTES
                memory[begin : begin + BLOCK_BYTES] = self.content(rank, number)

    def holds(self, numbers, *, at):
        return all(self.slot(rank, at + n) == self.content(rank, n) for rank in self.memories for n in numbers)

    def slot(self, rank, slot):
        return self.memories[rank][slot * VALUE_BYTES : slot * VALUE_BYTES + BLOCK_BYTES]

    # ---- commands

    def answer(self):
        return self.answers.get(timeout=LIMIT_S)

    def begin_store(self, *numbers):
        self.process.store("s", hashes(numbers), numbers)

    def store(self, *numbers):
        self.fill(numbers)
        self.begin_store(*numbers)
        return self.answer()

    def begin_load(self, *numbers, at=8):
        self.process.load("l", hashes(numbers), [at + number for number in numbers])

    def load(self, *numbers, at=8):
        self.begin_load(*numbers, at=at)
        return self.answer()

    def query(self, *numbers):
        self.process.query("q", hashes(numbers))
        return self.answer()

    def touch(self, *numbers):
        self.process.touch("t", hashes(numbers))
        return self.answer()

    # ---- faults

    def breaks(self, **faults):
        temporary = self.directory / "faults.new"
        temporary.write_text(json.dumps(faults))
        temporary.rename(self.directory / "faults")

    def calls(self, what):
        """Keys of each call so far."""
        try:
            lines = (self.directory / "calls").read_text().splitlines()
        except FileNotFoundError:
            return []
        return [keys for name, keys in map(json.loads, lines) if name == what]

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def kill(self):
        os.kill(self.process.pid, signal.SIGKILL)

    def close(self):
        self.process.close()
