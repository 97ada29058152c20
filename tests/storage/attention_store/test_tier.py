"""AttentionStoreTier with several ranks: a block is there, or is stored, when it is so on all of them."""

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.metadata import SWAP_IN, TransferReport, TransferResult
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import BlockHasher
from fastdeploy_kvcache_v1.storage.attention_store.tasks import MatchTask, ReadStorageTask, WriteDone, WriteStorageTask
from fastdeploy_kvcache_v1.storage.attention_store.tier import AttentionStoreTier
from fastdeploy_kvcache_v1.storage.messages import LoadDone, QueryDone, UseNamespace
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.storage.attention_store.memory import space

RANKS = 2
LONG = tuple(range(100))


class RecordingLink:
    num_ranks = RANKS

    def __init__(self):
        self.sent = []

    def send(self, command):
        self.sent.append(command)

    def all(self, kind):
        return [command for command in self.sent if isinstance(command, kind)]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Engine:
    def __init__(self, device=64, **settings):
        self.manager = CacheManager(KVCacheConfig(device, 0, block_size=1))
        self.link, self.clock = RecordingLink(), Clock()
        settings = StorageSettings("attention_store", min_tokens=1, **settings)
        self.tier = AttentionStoreTier(self.manager, settings, space(), self.link, clock=self.clock)

    def arrive(self, tokens, stored):
        self.tier.request_arrived("r", hashed(tokens), tokens)
        self.tier.answered(QueryDone(self.link.all(MatchTask)[-1].task_id, stored))

    def compute(self, tokens):
        """A whole request, which has ended; what is told of its step besides is up to the test."""
        sequence = hashed(tokens)
        self.manager.match_prefix("c", sequence)
        self.manager.allocate("c", len(tokens) - 1)
        step = self.manager.take_swap_step()
        self.tier.step_taken(step, computes=True)
        self.manager.commit("c", len(tokens) - 1)
        self.manager.finish("c")
        self.tier.request_ended(sequence, tokens)
        self.tier.go_on()
        return step.step

    def read_done(self, task, counts, **options):
        for rank, count in enumerate(counts):
            self.tier.answered(LoadDone(task.task_id, rank, count, **options))

    def write_done(self, task, counts, **options):
        for rank, count in enumerate(counts):
            self.tier.answered(WriteDone(task.task_id, rank, count, num_stored=count, **options))

    def num_cached(self, tokens):
        return self.manager.count_cached(hashed(tokens).hashes)


def hashed(tokens):
    hasher = BlockHasher(1)
    hasher.extend(tokens)
    return hasher


@pytest.fixture
def engine():
    return Engine()


def test_the_namespace_is_named_first(engine):
    assert engine.link.sent == [UseNamespace(space())]


@pytest.mark.parametrize(("arrived", "cached"), [((3, 3), 3), ((3, 1), 1), ((0, 3), 0)])
def test_a_loaded_block_is_there_when_it_is_on_all_ranks(engine, arrived, cached):
    engine.arrive((7, 8, 9, 10), 3)
    (task,) = engine.link.all(ReadStorageTask)
    assert (task.token_ids, task.start_read_block_idx, len(task.gpu_block_ids)) == ((7, 8, 9), 0, 3)
    engine.read_done(task, arrived[:1])
    assert engine.num_cached((7, 8, 9)) == 0
    engine.read_done(task, ())
    engine.tier.answered(LoadDone(task.task_id, 1, arrived[1]))
    assert engine.num_cached((7, 8, 9)) == cached
    assert engine.tier.may_start("r")
    engine.manager.check_idle()


def test_a_read_that_failed_on_one_rank_keeps_its_slots_until_the_last_rank_is_quiet(engine):
    engine.arrive((7, 8, 9, 10), 3)
    (task,) = engine.link.all(ReadStorageTask)
    engine.tier.answered(LoadDone(task.task_id, 0, 0, error="reset", quiet_after_s=30.0))
    engine.clock.now = 10.0
    engine.tier.answered(LoadDone(task.task_id, 1, 3))
    assert engine.tier.may_start("r")
    assert engine.manager.stats().quarantined_blocks == 3
    assert engine.tier.seconds_to_next_deadline() == 20.0
    engine.clock.now = 29.9
    engine.tier.go_on()
    assert engine.manager.stats().quarantined_blocks == 3
    engine.clock.now = 30.0
    engine.tier.go_on()
    assert engine.tier.is_idle
    assert engine.num_cached((7, 8, 9)) == 0
    engine.manager.check_idle()


def test_paths_are_whole_and_pieces_go_one_after_the_other(engine):
    step = engine.compute(LONG[:41])
    assert not engine.link.all(WriteStorageTask), "its pass has not ended"
    engine.tier.pass_ended(step)
    engine.tier.go_on()
    tasks = engine.link.all(WriteStorageTask)
    assert [(task.start_write_block_idx, task.token_ids) for task in tasks] == [(0, LONG[:8])], "an eighth of the tier"
    while not engine.tier.is_idle:
        task = engine.link.all(WriteStorageTask)[-1]
        assert len(task.gpu_block_ids) == len(task.token_ids) - task.start_write_block_idx
        engine.write_done(task, (8, 8))
    tasks = engine.link.all(WriteStorageTask)
    assert [task.start_write_block_idx for task in tasks] == [0, 8, 16, 24, 32]
    assert tasks[-1].token_ids == LONG[:40]
    assert engine.tier.counters.store.blocks == 80
    engine.manager.check_idle()


def test_what_one_rank_could_not_store_is_not_gone_on_with(engine):
    engine.tier.pass_ended(engine.compute(LONG[:41]))
    engine.tier.go_on()
    (task,) = engine.link.all(WriteStorageTask)
    engine.write_done(task, (8, 5))
    assert engine.tier.is_idle
    assert engine.tier.counters.skipped_store_blocks == 35
    engine.tier.pass_ended(engine.compute(LONG[:41]))
    engine.tier.go_on()
    assert engine.link.all(WriteStorageTask)[-1].start_write_block_idx == 5


def test_blocks_that_left_the_store_are_stored_again_at_the_next_chance(engine):
    engine.tier.pass_ended(engine.compute(LONG[:9]))
    engine.tier.go_on()
    engine.write_done(engine.link.all(WriteStorageTask)[-1], (8, 8))
    for first, counts in ((8, (0, 0)), (0, (8, 8))):
        engine.tier.pass_ended(engine.compute(LONG[:13]))
        engine.tier.go_on()
        task = engine.link.all(WriteStorageTask)[-1]
        assert task.start_write_block_idx == first
        engine.write_done(task, counts)
    assert engine.link.all(WriteStorageTask)[-1].start_write_block_idx == 8


def test_slots_of_a_failed_write_are_kept_until_it_reads_no_more(engine):
    engine.tier.pass_ended(engine.compute(LONG[:5]))
    engine.tier.go_on()
    (task,) = engine.link.all(WriteStorageTask)
    engine.write_done(task, (0, 0), error="reset", quiet_after_s=5.0)
    assert not engine.tier.is_idle
    assert engine.tier.holds_device_blocks
    assert engine.manager.num_available_device_blocks == 60
    engine.clock.now = 5.0
    engine.tier.go_on()
    assert engine.tier.is_idle
    assert not engine.tier.holds_device_blocks
    engine.manager.check_idle()


def test_the_same_blocks_are_stored_once(engine):
    for _ in range(5):
        engine.tier.pass_ended(engine.compute(LONG[:5]))
    engine.tier.go_on()
    (task,) = engine.link.all(WriteStorageTask)
    engine.write_done(task, (4, 4))
    engine.tier.go_on()
    assert engine.link.all(WriteStorageTask) == [task]
    assert engine.tier.is_idle


def test_a_store_that_fails_is_left_alone_and_what_it_misses_is_counted(engine):
    for number in range(5):
        engine.tier.pass_ended(engine.compute((900 + number, 1, 2)))
        engine.tier.go_on()
        if number < 3:
            engine.write_done(engine.link.all(WriteStorageTask)[-1], (0, 0), error="no space")
    assert engine.tier.is_left_alone
    assert len(engine.link.all(WriteStorageTask)) == 3, "what fails on both ranks has failed once"
    assert engine.tier.counters.skipped_store_blocks == 10


def test_running_requests_keep_an_eighth_of_the_device_tier_to_grow_into():
    engine = Engine(device=16)
    engine.manager.match_prefix("runs", hashed(LONG[:15]))
    engine.manager.allocate("runs", 14)
    engine.tier.step_taken(engine.manager.take_swap_step())
    engine.arrive((7, 8, 9, 10), 3)
    assert not engine.link.all(ReadStorageTask)
    assert not engine.tier.may_start("r")
    engine.manager.finish("runs")
    engine.tier.go_on()
    assert len(engine.link.all(ReadStorageTask)) == 1


def test_a_failed_copy_into_other_slots_voids_nothing(engine):
    step = engine.compute(LONG[:5])
    engine.tier.copies_reported(0, TransferReport((TransferResult(step, *SWAP_IN, 1, 0, 0.0, (63,), "injected"),)))
    engine.tier.pass_ended(step)
    engine.tier.go_on()
    assert len(engine.link.all(WriteStorageTask)) == 1


def test_to_follow_the_cache_its_events_are_needed():
    manager = CacheManager(KVCacheConfig(8, max_queued_events=0))
    settings = StorageSettings("attention_store", flush_only=True)
    with pytest.raises(ConfigError, match="set max_queued_events above 0"):
        AttentionStoreTier(manager, settings, space(), RecordingLink())
