"""A cache over a store process that fails, hangs, stands still and is killed: no wrong byte, and nothing is left."""

import hashlib
import random
import time
from dataclasses import replace

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import CacheLevel, WorkerReport
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.process import Limits
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.storage.store_host import LIMIT_S, NUM_SLOTS, StoreHost, forget_kinds, install
from tests.storage.values import BLOCK_BYTES, VALUE_BYTES, namespace

pytestmark = pytest.mark.process

RANKS = 2
SPEED = 20
"""Of the clock of the server: it leaves a store alone for a fraction of a second."""
IMPATIENT = Limits(answer_s=0.2, bytes_per_s=1e9, first_pause_s=0.02, longest_pause_s=0.1)
FAULTS = ({"get": "hang"}, {"put": "hang"}, {"count_stored": "hang"}, {"get": "reset"}, {"put": "full"}, {"open": "no"})


@pytest.fixture
def host(tmp_path, monkeypatch):
    install(tmp_path, monkeypatch)
    made = StoreHost(tmp_path / "store", ranks=RANKS, heads=RANKS, limits=IMPATIENT, starts=False)
    yield made
    made.breaks()
    made.close()
    monkeypatch.undo()
    forget_kinds()


class Server:
    """One request runs at a time. Every block has bytes that follow from its hash and its rank."""

    def __init__(self, host, seed):
        self.host, self.rng = host, random.Random(seed)
        config = KVCacheConfig(24, NUM_SLOTS, block_size=1, write_policy=WritePolicy.WRITE_THROUGH)
        self.manager = CacheManager(config)
        settings = StorageSettings("faulty", min_tokens=1)
        for rank in range(RANKS):
            host.use_memory(rank)
        self.tier = StorageTier(
            self.manager, settings, namespace(), host.process, clock=lambda: SPEED * time.monotonic()
        )
        host.wait_until_it_serves()
        self.waiting, self.device, self.num_requests, self.num_cached = {}, {}, 0, 0

    def prompt(self):
        """Of few conversations, so that what has left the cache comes again."""
        text = "".join(self.rng.choice("abc") for _ in range(2)) + "x" * self.rng.randrange(4, 12)
        hashes = [hashlib.sha256(text[: end + 1].encode()).digest() for end in range(len(text))]
        return GivenHashes(hashes, len(text))

    def turn(self):
        while not self.host.answers.empty():
            self.tier.answered(self.host.answers.get())
        if len(self.waiting) < 3:
            name, prompt = f"r{self.num_requests}", self.prompt()
            self.num_requests += 1
            self.waiting[name] = prompt
            self.tier.request_arrived(name, prompt)
        self.tier.look_again()
        for name in [name for name in self.waiting if self.tier.may_start(name)][:1]:
            self.run(name, self.waiting.pop(name))
        self.tier.go_on()
        self.manager.check()

    def run(self, name, prompt):
        match = self.manager.match_prefix(name, prompt)
        self.manager.allocate(name, prompt.num_tokens)
        self.tier.request_left(name)
        self.step()
        table = self.manager.block_table(name)
        for number, (block, slot) in enumerate(zip(prompt.hashes, table, strict=False)):
            if number < match.num_blocks:
                assert self.device[slot] == contents(block), f"block {number} of {name} has wrong bytes"
            self.device[slot] = contents(block)
        self.num_cached += match.num_blocks
        self.manager.commit(name, prompt.num_tokens)
        self.manager.finish(name)
        self.step()

    def step(self):
        """The ranks make all copies at once, and report them."""
        step = self.manager.take_swap_step()
        self.tier.step_taken(step)
        for copies in step.transfers:
            for source, target in zip(copies.source_slots, copies.target_slots, strict=True):
                if copies.target is CacheLevel.HOST:
                    for rank, value in enumerate(self.device[source]):
                        begin = target * VALUE_BYTES
                        self.host.memories[rank][begin : begin + BLOCK_BYTES] = value
                else:
                    self.device[target] = [self.host.slot(rank, source) for rank in range(RANKS)]
        for rank in range(RANKS):
            self.tier.copies_reported(rank, WorkerReport((), 0.0, step.step))

    def fault(self):
        kind = self.rng.choice(("kill", "stop", "call", "call", "call", "memory"))
        pid = self.host.process.pid
        if kind == "call":
            self.host.breaks(**self.rng.choice(FAULTS))
        elif kind == "memory":
            self.new_memory()
        elif pid is not None and self.host.process.is_serving:
            self.host.kill() if kind == "kill" else self.host.stop()
        return kind

    def new_memory(self):
        """The ranks lose their memory, and what was in it."""
        self.manager.reset_cache()
        self.tier.cache_reset()
        for rank in range(RANKS):
            self.host.process.drop_memory(rank)
            self.host.use_memory(rank)


def contents(block):
    return [hashlib.shake_128(block + bytes([rank])).digest(BLOCK_BYTES) for rank in range(RANKS)]


@pytest.mark.parametrize(("seed", "compute_s"), [(0, None), (1, None), (2, None), (3, None), (4, 1e3), (5, 1e3)])
def test_no_fault_of_a_store_leaves_a_wrong_byte_a_slot_or_a_request(host, seed, compute_s):
    """`compute_s` of a block: so long would a request wait for it if the store were not killed first."""
    server = Server(host, seed)
    if compute_s is not None:
        server.tier.weigh(lambda start, end: compute_s * (end - start))
    for _ in range(40):
        for _ in range(server.rng.randrange(1, 12)):
            server.turn()
            time.sleep(0.002)
        server.fault()
        for _ in range(server.rng.randrange(1, 30)):
            server.turn()
            time.sleep(0.002 * server.rng.randrange(4))
        if server.rng.random() < 0.7:
            host.breaks()
    host.breaks()
    host.process._limits = replace(IMPATIENT, answer_s=LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    loaded = server.tier.counters.load.blocks
    while server.tier.counters.load.blocks == loaded:
        assert time.monotonic() < deadline, "the store is never used again"
        server.turn()
        time.sleep(0.002)
    while server.waiting or not server.tier.is_idle:
        assert time.monotonic() < deadline, "a request waits, or a slot is kept, for ever"
        for name in server.waiting:
            server.tier.request_left(name)
        server.waiting.clear()
        while not host.answers.empty():
            server.tier.answered(host.answers.get())
        time.sleep(0.002)
    server.manager.check_idle()
    counters = server.tier.counters
    assert counters.load.failures + counters.store.failures > 0, "some were under way when the store failed"
