"""A server's end of the attention store in this process: a link, agents of its ranks, and memory to look at."""

from __future__ import annotations

import json
import queue
import tempfile
import time
from pathlib import Path

from fastdeploy_kvcache_v1.errors import StorageError
from fastdeploy_kvcache_v1.lab.server.worker.messages import LINK_TYPES
from fastdeploy_kvcache_v1.link.engine import EngineLink
from fastdeploy_kvcache_v1.link.rank import RankLink
from fastdeploy_kvcache_v1.storage.attention_store.agent import AttentionStoreAgent
from fastdeploy_kvcache_v1.storage.attention_store.tasks import ANSWERS, MatchTask, ReadStorageTask, WriteStorageTask
from fastdeploy_kvcache_v1.storage.engine.link import StorageLink
from fastdeploy_kvcache_v1.storage.messages import UseNamespace
from tests.storage.attention_store.memory import Memory as DeviceMemory
from tests.storage.attention_store.memory import space, tokens
from tests.storage.attention_store.stand_in import set_faults

LIMIT_S = 20.0
BLOCKS = (0, 1, 2, 3)
INTO = (7, 6, 5, 4)
"""Slots that loads fill; those of `BLOCKS` are stored."""

SDK_CALLS = {"load": "read", "store": "write", "query": "match"}


class Machine:
    """What the servers of all stores have in common. Blocks are numbers, and lie in the slots of their numbers."""

    def __init__(self, ranks: int) -> None:
        self._sockets = tempfile.TemporaryDirectory()
        path = Path(self._sockets.name, "link")
        self._engine = EngineLink(path, ranks, LINK_TYPES, word="")
        self.link = StorageLink(self._engine, ANSWERS)
        self._engine.listen(self.link.handlers, lambda rank: None)
        self.ranks = [RankLink(path, rank, ranks, LINK_TYPES, word="") for rank in range(ranks)]
        self.answers = queue.SimpleQueue()

    def make(self, agent, memory, **options) -> None:
        self.agents = [agent(each.send, rank=rank, **options) for rank, each in enumerate(self.ranks)]
        self.memory = [memory(rank) for rank in range(len(self.ranks))]

    def start(self) -> None:
        for rank, agent in zip(self.ranks, self.agents, strict=True):
            rank.listen(agent.handlers)
        while not self.link.is_ready:
            time.sleep(0.001)
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
        for rank in self.ranks:
            rank.close()
        self._engine.close()
        self._sockets.cleanup()


class DeviceMachine(Machine):
    """Of the attention store, by its stand-in SDK."""

    def __init__(self, directory, ranks=1, connects=True, **options):
        self.directory, self._ranks = directory, ranks
        super().__init__(ranks)
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
