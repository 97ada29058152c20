"""A server's end of a store in this process: a link, the agents of its ranks, and memory that can be looked at."""

from __future__ import annotations

import json
import queue
import tempfile
import threading
import time

from fastdeploy_kvcache_v1.errors import StorageError
from fastdeploy_kvcache_v1.storage.agent import StorageAgent
from fastdeploy_kvcache_v1.storage.attention_store.agent import NUM_LANES, AttentionStoreAgent
from fastdeploy_kvcache_v1.storage.attention_store.tasks import MatchTask, ReadStorageTask, WriteStorageTask
from fastdeploy_kvcache_v1.storage.engine.link import StorageLink
from fastdeploy_kvcache_v1.storage.messages import LoadBlocks, StoreBlocks, UseNamespace
from tests.storage.attention_store.memory import Memory as DeviceMemory
from tests.storage.attention_store.memory import space, tokens
from tests.storage.attention_store.stand_in import set_faults
from tests.storage.values import BLOCK_BYTES, VALUE_BYTES, block_hash, namespace

LIMIT_S = 20.0
BLOCKS = (0, 1, 2, 3)
HASHES = tuple(map(block_hash, BLOCKS))
INTO = (7, 6, 5, 4)
"""Slots that loads fill; those of `BLOCKS` are stored."""

HOST_CALLS = {"load": "get", "store": "put", "query": "count_stored"}
SDK_CALLS = {"load": "read", "store": "write", "query": "match"}


class Machine:
    """What the servers of all stores have in common. Blocks are numbers, and lie in the slots of their numbers."""

    def __init__(self, ranks: int, lanes_per_agent: int, open_backend) -> None:
        self._sockets = tempfile.TemporaryDirectory()
        self.commands = [f"ipc://{self._sockets.name}/{rank}" for rank in range(ranks)]
        self.results = f"ipc://{self._sockets.name}/results"
        self.link = StorageLink(self.commands, self.results, open_backend=open_backend, lanes_per_agent=lanes_per_agent)
        self.answers = queue.SimpleQueue()

    def make(self, agent, memory, **options) -> None:
        self.agents = [agent(each, self.results, rank=rank, **options) for rank, each in enumerate(self.commands)]
        self.memory = [memory(rank) for rank in range(len(self.commands))]

    def start(self) -> None:
        while not self.link.is_connected(100):
            pass
        self.link.listen(self.answers.put)
        self.use_namespace()
        self.fill()

    def ask(self, command):
        """Returns the answers of all ranks, in order of ranks."""
        self.link.send(command)
        answers = sorted((self.answers.get(timeout=LIMIT_S) for _ in self.agents), key=lambda done: done.rank)
        assert [done.rank for done in answers] == list(range(len(self.agents)))
        return [getattr(done, "answer", done) for done in answers]

    def answer(self):
        answer = self.answers.get(timeout=LIMIT_S)
        return getattr(answer, "answer", answer)

    def store(self, *blocks):
        return self.ask(self.storing(*blocks))

    def load(self, *blocks):
        return self.ask(self.loading(*blocks))

    def fill(self):
        for memory in self.memory:
            for block in BLOCKS:
                memory.fill(block, block)

    def holds(self, *blocks):
        """All ranks have them where `load` brings them."""
        return all(memory.holds(INTO[block], block) for memory in self.memory for block in blocks)

    def use_namespace(self, **changes):
        self.link.send(UseNamespace(self.namespace(**changes)))

    def close(self):
        self.works()
        for agent in self.agents:
            agent.close()
        self.link.close()
        self._sockets.cleanup()


class HostMemory:
    """Host slots of one rank."""

    def __init__(self, rank=0):
        self.rank = rank
        self.slots = [bytearray(VALUE_BYTES) for _ in range(8)]
        self.refilled = []

    def __call__(self, slot):
        return memoryview(self.slots[slot])

    def fill(self, slot, number):
        self.slots[slot][:BLOCK_BYTES] = bytes([16 * self.rank + number + 1]) * BLOCK_BYTES

    def holds(self, slot, number):
        return self.slots[slot][:BLOCK_BYTES] == bytes([16 * self.rank + number + 1]) * BLOCK_BYTES


class HostMachine(Machine):
    """Of a store of values by key."""

    def __init__(self, connect, ranks=1):
        super().__init__(ranks, 2, self.connect)
        self._connect = connect
        self.faults, self.log = {}, []
        """By call of the backend: what happens before it. What was done with connections, in order."""
        self.reached, self.released = threading.Event(), threading.Event()
        self.make(StorageAgent, HostMemory, open_backend=self.connect)
        for agent, memory in zip(self.agents, self.memory, strict=True):
            agent.use(memory, refilled=memory.refilled.append)
        self.start()

    def connect(self, space):
        return Faulty(self._connect(space), self)

    def namespace(self, **changes):
        return namespace(**changes)

    def storing(self, *blocks):
        return StoreBlocks("s", tuple(HASHES[block] for block in blocks), blocks)

    def loading(self, *blocks):
        return LoadBlocks("l", tuple(HASHES[block] for block in blocks), tuple(INTO[block] for block in blocks))

    def query(self, *blocks):
        self.link.query("q", [HASHES[block] for block in blocks])
        return self.answer()

    def commit(self, *blocks):
        self.link.commit("s", [HASHES[block] for block in blocks])
        return self.answer()

    def fails(self, error, *what):
        def fail(*_):
            raise error if isinstance(error, Exception) else StorageError(error)

        self.faults.update({HOST_CALLS[each]: fail for each in what})

    def hangs(self, what):
        self.faults[HOST_CALLS[what]] = lambda *_: (self.reached.set(), self.released.wait(LIMIT_S))

    def wait_until_it_hangs(self):
        assert self.reached.wait(LIMIT_S)

    def works(self):
        self.faults.clear()
        self.released.set()


class Faulty:
    """A backend in front of another one."""

    may_write_late = True

    def __init__(self, inner, machine):
        self._inner, self._machine = inner, machine
        self.namespace_digest = inner.namespace_digest
        machine.log.append("open")

    def __getattr__(self, name):
        def call(*given):
            self._machine.faults.get(name, lambda *_: None)(*given)
            return getattr(self._inner, name)(*given)

        return call

    def close(self):
        self._machine.log.append("close")
        self._inner.close()


class DeviceMachine(Machine):
    """Of the attention store, by its stand-in SDK."""

    def __init__(self, directory, ranks=1, connects=True, **options):
        self.directory, self._ranks = directory, ranks
        super().__init__(ranks, NUM_LANES, None)
        self.make(AttentionStoreAgent, DeviceMemory, **options)
        if connects:
            for agent, memory in zip(self.agents, self.memory, strict=True):
                agent.use(memory.caches())
                agent.connect(self.namespace())
        self.start()

    def namespace(self, **changes):
        return space(**{"tensor_parallel_size": self._ranks, **changes})

    def path(self, *blocks):
        return tokens(*range(blocks[-1] + 1))

    def storing(self, *blocks, path=None, **options):
        return WriteStorageTask(
            task_id="s",
            token_ids=path or self.path(*blocks),
            gpu_block_ids=blocks,
            start_write_block_idx=blocks[0],
            **options,
        )

    def loading(self, *blocks, **options):
        return ReadStorageTask(
            task_id="l",
            token_ids=self.path(*blocks),
            gpu_block_ids=tuple(INTO[block] for block in blocks),
            start_read_block_idx=blocks[0],
            **options,
        )

    def query(self, *blocks):
        self.link.send(MatchTask(task_id="q", token_ids=self.path(*blocks), first_block_idx=blocks[0]))
        return self.answer()

    def commit(self, *blocks):
        """The SDK does by itself."""

    def breaks(self, **faults):
        set_faults(self.directory, **faults)

    def fails(self, error, *what):
        kind = "crash" if isinstance(error, Exception) and not isinstance(error, StorageError) else "error"
        self.breaks(**{SDK_CALLS[each]: {kind: str(error)} for each in what})

    def hangs(self, what):
        self.breaks(**{SDK_CALLS[what]: {"hang": True, "times": 1}})

    def wait_until_it_hangs(self):
        faults = self.directory / "faults.json"
        while not any(fault.get("times") == 0 for fault in json.loads(faults.read_text()).values()):
            time.sleep(0.01)

    def works(self):
        self.breaks()
