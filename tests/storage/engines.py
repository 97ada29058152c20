"""An engine's storage tier with what it decides for: a cache manager, a link that records, and a clock.

A prompt is a text; each letter is a block, and the last one is not cached.
"""

from __future__ import annotations

from typing import NamedTuple

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import SWAP_OUT, BlockHash, CopyResult, WorkerReport
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.storage.attention_store.tasks import MatchTask, ReadStorageTask, WriteDone, WriteStorageTask
from fastdeploy_kvcache_v1.storage.attention_store.tier import AttentionStoreTier
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.messages import (
    LoadBlocks,
    LoadDone,
    QueryDone,
    RankDone,
    StoreBlocks,
    StoreDone,
    TouchDone,
    UseNamespace,
)
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.storage.attention_store.memory import space
from tests.storage.values import namespace


class Prompt(GivenHashes):
    def __init__(self, text: str, num_plain_blocks: int | None = None, block_size: int = 1):
        super().__init__([BlockHash(text[: end + 1].encode()) for end in range(len(text))], len(text) * block_size)
        self.num_plain_blocks = len(text) if num_plain_blocks is None else num_plain_blocks


class Move(NamedTuple):
    """Of a piece of a prompt, from or to a store."""

    id: str
    path: str
    """To its last block."""
    slots: tuple[int, ...]


class RecordingLink:
    """Of either kind: a `StoreLink`, and a `CommandLink`."""

    def __init__(self, num_ranks):
        self.num_ranks, self.is_serving = num_ranks, True
        self.sent, self.queries, self.touched, self.touches = [[] for _ in range(4)]

    def send(self, command):
        self.sent.append(command)
        if isinstance(command, MatchTask):
            self.queries.append(command.task_id)

    def query(self, query_id, hashes):
        self.queries.append(query_id)
        self.sent.append([block.decode() for block in hashes])

    def use_namespace(self, namespace):
        self.sent.append(UseNamespace(namespace))

    def load(self, load_id, hashes, slots):
        self.sent.append(LoadBlocks(load_id, tuple(hashes), slots))

    def store(self, store_id, hashes, slots):
        self.sent.append(StoreBlocks(store_id, tuple(hashes), slots))

    def touch(self, touch_id, hashes):
        self.touched.append(hashes[-1].decode())
        self.touches.append(touch_id)

    def all(self, kind):
        return [command for command in self.sent if isinstance(command, kind)]


class Engine:
    """`kind`: which tier the store exchanges blocks with, host or device. `backup`: host blocks that it does not."""

    def __init__(
        self, kind, *, device=256, host=64, backup=0, ranks=2, events=0, block_size=1, policy=None, **settings
    ):
        self.kind, self.ranks, self.block_size, self.now = kind, ranks, block_size, 0.0
        on_host = kind == "host"
        make = StorageTier if on_host else AttentionStoreTier
        policy = policy or (WritePolicy.WRITE_THROUGH if on_host else KVCacheConfig.write_policy)
        self.manager = CacheManager(
            KVCacheConfig(
                device,
                host if on_host else backup,
                block_size=block_size,
                max_queued_events=events,
                write_policy=policy,
            )
        )
        self.link = RecordingLink(ranks)
        settings = StorageSettings("mooncake" if on_host else "attention_store", **{"min_tokens": 1, **settings})
        self.namespace = namespace() if on_host else space()
        self.tier = make(self.manager, settings, self.namespace, self.link, clock=lambda: self.now)

    def arrive(self, name, text, stored=None):
        self.tier.request_arrived(name, Prompt(text, block_size=self.block_size), tuple(map(ord, text)))
        if stored is not None:
            self.answer(stored)

    def answer(self, stored, **options):
        self.tier.answered(QueryDone(self.link.queries[-1], stored, **options))

    @property
    def loads(self):
        return [
            Move(each.load_id, each.hashes[-1].decode(), each.slots)
            if isinstance(each, LoadBlocks)
            else Move(each.task_id, "".join(map(chr, each.token_ids)), each.gpu_block_ids)
            for each in self.link.all((LoadBlocks, ReadStorageTask))
        ]

    @property
    def stores(self):
        return [
            Move(each.store_id, each.hashes[-1].decode(), each.slots)
            if isinstance(each, StoreBlocks)
            else Move(each.task_id, self._stored_path(each), each.gpu_block_ids)
            for each in self.link.all((StoreBlocks, WriteStorageTask))
        ]

    def _stored_path(self, task):
        end = task.start_write_block_idx + len(task.gpu_block_ids)
        return "".join(map(chr, task.token_ids[: end * self.block_size]))

    @property
    def statements(self):
        """Of the index: a path, its first block that is meant, and whether it is here."""
        return [
            ("".join(map(chr, each.token_ids)), each.start_write_block_idx, each.flush_cache_exists)
            for each in self.link.all(WriteStorageTask)
        ]

    def loaded(self, move, *counts, rank=0, **options):
        """The answer of a store over the host tier, or those of ranks, from `rank` on; without counts all have all."""
        if self.kind == "host":
            self.tier.answered(LoadDone(move.id, *(counts or [len(move.slots)]), **options))
            return
        for number, count in enumerate(counts or [len(move.slots)] * self.ranks, rank):
            self.tier.answered(RankDone(number, LoadDone(move.id, count, **options)))

    def stored(self, move, *counts, rank=0, **options):
        if self.kind == "host":
            self.tier.answered(StoreDone(move.id, *(counts or [len(move.slots)]), **options))
            return
        for number, count in enumerate(counts or [len(move.slots)] * self.ranks, rank):
            self.tier.answered(RankDone(number, WriteDone(move.id, count, num_stored=count, **options)))

    def touched(self, num_stored, error=None):
        """The store has so many of the blocks that it was told of last."""
        self.tier.answered(TouchDone(self.link.touches[-1], num_stored, error))

    def compute(self, text, **options):
        """A whole request. Returns its step; that its bytes are there is told by `report`."""
        prompt = Prompt(text, **options)
        self.manager.match_prefix(text, prompt)
        self.manager.allocate(text, len(text) - 1)
        step = self.manager.take_swap_step()
        self.tier.step_taken(step, computes=self.kind == "device")
        self.manager.commit(text, len(text) - 1)
        self.manager.finish(text)
        if self.kind == "host":
            step = self.manager.take_swap_step()
            self.tier.step_taken(step)
        self.tier.request_ended(prompt, tuple(map(ord, text)))
        self.tier.go_on()
        return step

    def report(self, step, *ranks, error=None):
        """The bytes of `step` are where the store reads them, or not: on all ranks, if none are named."""
        if self.kind == "device":
            self.tier.pass_ended(step.step)
        for rank in ranks or range(self.ranks):
            result = CopyResult(step.step, *SWAP_OUT, 1, 1, 0.1, (0,) if error else (), error)
            results = (result,) if self.kind == "host" else ()
            self.tier.copies_reported(rank, WorkerReport(results, 0.0, step.step))
        self.tier.go_on()

    def cached(self, text):
        return self.manager.count_cached(Prompt(text).hashes)

    def check_idle(self):
        assert self.tier.is_idle
        self.manager.check_idle()
