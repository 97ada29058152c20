"""StorageTier with several ranks: a block is there, or is stored, when it is so on all of them."""

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.metadata import EVICT, BlockHash, TransferReport, TransferResult
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import GivenHashes
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.messages import LoadBlocks, LoadDone, QueryDone, StoreBlocks, StoreDone, UseNamespace
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from tests.storage.values import namespace

RANKS = 2


class RecordingLink:
    num_ranks = RANKS

    def __init__(self):
        self.queries, self.sent, self.committed, self.touched = [], [], [], []

    def query(self, query_id, hashes):
        self.queries.append((query_id, list(hashes)))

    def send(self, command):
        self.sent.append(command)

    def commit(self, hashes):
        self.committed.append(tuple(hashes))

    def touch(self, hashes):
        self.touched.append(tuple(hashes))

    def last(self, kind):
        return next(command for command in reversed(self.sent) if isinstance(command, kind))


@pytest.fixture
def link():
    return RecordingLink()


@pytest.fixture
def manager():
    return CacheManager(KVCacheConfig(16, 16, block_size=1, write_policy=WritePolicy.WRITE_THROUGH))


@pytest.fixture
def tier(manager, link):
    return StorageTier(manager, StorageSettings("file", "/unused", min_tokens=1), namespace(), link, clock=lambda: 0.0)


def prompt(text):
    return GivenHashes([BlockHash(text[: end + 1].encode()) for end in range(len(text))], len(text))


def compute(manager, tier, text):
    """A whole request; returns the step that backs its blocks up, which no rank has reported yet."""
    manager.match_prefix(text, prompt(text))
    manager.allocate(text, len(text) - 1)
    tier.step_taken(manager.take_swap_step())
    manager.commit(text, len(text) - 1)
    manager.finish(text)
    step = manager.take_swap_step()
    tier.step_taken(step)
    return step


def report(tier, step, rank, error=None):
    result = TransferResult(step.step, *EVICT, 1, 1, 0.1, (0,) if error else (), error)
    tier.copies_reported(rank, TransferReport((result,), 0.0, step.step))
    tier.go_on()


def test_what_had_no_room_on_a_rank_is_counted_and_not_committed_and_the_next_is_stored(manager, tier, link):
    for text in ("abc!", "xyz!"):
        step = compute(manager, tier, text)
        for rank in range(RANKS):
            report(tier, step, rank)
    first, second = (command for command in link.sent if isinstance(command, StoreBlocks))
    tier.answered(StoreDone(first.store_id, 0, 3))
    tier.answered(StoreDone(first.store_id, 1, 1, num_refused=2))
    assert link.committed == []
    assert tier.counters.refused_store_blocks == 2
    assert (tier.counters.store.failures, tier.is_left_alone) == (0, False)
    for rank in range(RANKS):
        tier.answered(StoreDone(second.store_id, rank, 3))
    assert link.committed == [second.hashes]


def test_the_namespace_is_named_first(tier, link):
    assert link.sent == [UseNamespace(namespace())]


def test_blocks_are_stored_when_all_ranks_have_copied_and_committed_when_all_have_stored(manager, tier, link):
    step = compute(manager, tier, "abc!")
    report(tier, step, 0)
    assert len(link.sent) == 1
    report(tier, step, 1)
    command = link.last(StoreBlocks)
    assert command.hashes == (b"a", b"ab", b"abc")
    assert command.slots == step.evict.target_slots
    tier.answered(StoreDone(command.store_id, 0, 3))
    assert link.committed == []
    tier.answered(StoreDone(command.store_id, 1, 3))
    assert link.committed == [command.hashes]
    assert tier.is_idle
    manager.check_idle()


def test_blocks_that_one_rank_could_not_store_are_not_committed(manager, tier, link):
    step = compute(manager, tier, "abc!")
    report(tier, step, 0)
    report(tier, step, 1)
    command = link.last(StoreBlocks)
    tier.answered(StoreDone(command.store_id, 0, 0, error="disk full"))
    tier.answered(StoreDone(command.store_id, 1, 3))
    assert link.committed == []
    assert tier.is_idle
    manager.check_idle()


def test_blocks_that_one_rank_could_not_copy_are_not_stored(manager, tier, link):
    step = compute(manager, tier, "abc!")
    report(tier, step, 0, error="ECC")
    report(tier, step, 1)
    assert len(link.sent) == 1


@pytest.mark.parametrize(("arrived", "cached"), [((3, 3), 3), ((3, 1), 1), ((0, 3), 0)])
def test_a_loaded_block_is_there_when_it_is_on_all_ranks(manager, tier, link, arrived, cached):
    tier.request_arrived("r", prompt("abc!"))
    tier.answered(QueryDone(link.queries[-1][0], 3))
    command = link.last(LoadBlocks)
    tier.answered(LoadDone(command.load_id, 0, arrived[0]))
    assert manager.count_cached(prompt("abc").hashes) == 0
    assert not tier.may_start("r")
    tier.answered(LoadDone(command.load_id, 1, arrived[1]))
    assert manager.count_cached(prompt("abc").hashes) == cached
    assert tier.may_start("r")
    manager.check_idle()


def test_a_load_waits_for_copies_that_use_its_slots(link, tier, manager):
    """All 16 host slots are filled by a copy that no rank has reported; a load takes some of them."""
    step = compute(manager, tier, "abcdefghijklmnop!")
    tier.request_arrived("r", prompt("xyz!"))
    tier.answered(QueryDone(link.queries[-1][0], 3))
    assert not any(isinstance(command, LoadBlocks) for command in link.sent)
    report(tier, step, 0)
    assert not any(isinstance(command, LoadBlocks) for command in link.sent)
    report(tier, step, 1)
    command = link.last(LoadBlocks)
    assert command.hashes == (b"x", b"xy", b"xyz")
    assert set(command.slots) <= set(step.evict.target_slots)
    store = link.last(StoreBlocks)
    assert not set(store.slots) & set(command.slots), "what the load takes is not stored any more"


def test_loads_wait_each_for_their_own_copies(link, tier, manager):
    first = compute(manager, tier, "abcdefghijklmnop!")
    tier.request_arrived("r", prompt("xyz!"))
    tier.answered(QueryDone(link.queries[-1][0], 3))
    second = compute(manager, tier, "ABCDEFGHIJKLM!")
    tier.request_arrived("s", prompt("uvw!"))
    tier.answered(QueryDone(link.queries[-1][0], 3))
    for rank in range(RANKS):
        report(tier, first, rank)
    loads = [command.hashes[0] for command in link.sent if isinstance(command, LoadBlocks)]
    assert loads == [b"x"]
    for rank in range(RANKS):
        report(tier, second, rank)
    loads = [command.hashes[0] for command in link.sent if isinstance(command, LoadBlocks)]
    assert loads == [b"x", b"u"]


def test_behind_a_block_that_is_missing_nothing_is_loaded(manager, link):
    long = "".join(chr(300 + number) for number in range(200))
    manager = CacheManager(KVCacheConfig(256, 1024, block_size=1))
    tier = StorageTier(manager, StorageSettings("file", "/unused", min_tokens=1), namespace(), link, clock=lambda: 0.0)
    tier.request_arrived("r", prompt(long))
    tier.answered(QueryDone(link.queries[-1][0], 199))
    loads = [command for command in link.sent if isinstance(command, LoadBlocks)]
    assert [len(command.slots) for command in loads] == [32, 32], "two pieces are under way"
    for rank in range(RANKS):
        tier.answered(LoadDone(loads[0].load_id, rank, 31))
    assert not tier.may_start("r"), "a piece is under way still"
    for rank in range(RANKS):
        tier.answered(LoadDone(loads[1].load_id, rank, 32))
    assert tier.may_start("r")
    assert link.last(LoadBlocks) is loads[1]
    assert manager.count_cached(prompt(long).hashes) == 31
    assert tier.is_idle


def test_after_a_reset_nothing_more_is_loaded(manager, link):
    long = "".join(chr(300 + number) for number in range(200))
    manager = CacheManager(KVCacheConfig(256, 1024, block_size=1))
    tier = StorageTier(manager, StorageSettings("file", "/unused", min_tokens=1), namespace(), link, clock=lambda: 0.0)
    tier.request_arrived("r", prompt(long))
    tier.answered(QueryDone(link.queries[-1][0], 199))
    loads = [command for command in link.sent if isinstance(command, LoadBlocks)]
    manager.reset_cache()
    tier.cache_reset()
    assert tier.may_start("r")
    for command in loads:
        for rank in range(RANKS):
            tier.answered(LoadDone(command.load_id, rank, 32))
    assert link.last(LoadBlocks) is loads[1]
    assert manager.count_cached(prompt(long).hashes) == 0
    assert tier.is_idle
    manager.check_idle()


def test_a_damaged_block_is_counted(tier, link):
    tier.request_arrived("r", prompt("abc!"))
    tier.answered(QueryDone(link.queries[-1][0], 3))
    command = link.last(LoadBlocks)
    tier.answered(LoadDone(command.load_id, 0, 1, is_damaged=True, num_bytes=10, seconds=0.5))
    assert tier.counters.damaged_blocks == 1
    assert tier.counters.load.bytes == 10


def test_a_query_that_is_answered_too_late_loads_nothing(tier, link):
    tier.request_arrived("r", prompt("abc!"))
    tier.request_left("r")
    tier.answered(QueryDone(link.queries[-1][0], 3))
    assert len(link.sent) == 1
    assert tier.is_idle


def test_a_new_namespace_is_told_to_all(tier, link):
    tier.cache_reset()
    tier.use_namespace(namespace(weight_epoch="1"))
    assert link.sent[-1] == UseNamespace(namespace(weight_epoch="1"))


def big(link, host):
    manager = CacheManager(KVCacheConfig(256, host, block_size=1, write_policy=WritePolicy.WRITE_THROUGH))
    settings = StorageSettings("file", "/unused", min_tokens=1)
    return manager, StorageTier(manager, settings, namespace(), link, clock=lambda: 0.0)


def long(first):
    return "".join(chr(first + number) for number in range(200))


def sent(link, kind):
    return [command for command in link.sent if isinstance(command, kind)]


def test_a_quarter_of_the_host_tier_is_filled_at_a_time(link):
    _, tier = big(link, 256)
    for name in ("r", "s"):
        tier.request_arrived(name, prompt(long(300 + 1000 * ord(name))))
        tier.answered(QueryDone(link.queries[-1][0], 199))
    assert sum(len(command.slots) for command in sent(link, LoadBlocks)) == 64


def arrive(tier, command):
    for rank in range(RANKS):
        tier.answered(LoadDone(command.load_id, rank, len(command.slots)))


def test_what_has_arrived_for_a_request_is_not_pushed_out_for_another_one_before_it_starts(link):
    """Each prefix has 12 blocks, and 24 of the host tier's 32 are filled ahead."""
    manager, tier = big(link, 32)
    for name in "abc":
        tier.request_arrived(name, prompt(name * 13))
        tier.answered(QueryDone(link.queries[-1][0], 12))
    for command in sent(link, LoadBlocks):
        arrive(tier, command)
    assert [command.hashes[0] for command in sent(link, LoadBlocks)] == [b"a", b"b"]
    assert [manager.count_cached(prompt(name * 12).hashes) for name in "abc"] == [12, 12, 0]
    tier.request_left("a")
    tier.go_on()
    assert [command.hashes[0] for command in sent(link, LoadBlocks)] == [b"a", b"b", b"c"]


def test_requests_that_share_a_prefix_as_large_as_fits_need_not_wait_for_each_other(link):
    _, tier = big(link, 32)
    for name in ("r", "s", "t"):
        tier.request_arrived(name, prompt("a" * 25))
        tier.answered(QueryDone(link.queries[-1][0], 24))
    (command,) = sent(link, LoadBlocks)
    arrive(tier, command)
    assert [tier.may_start(name) for name in ("r", "s", "t")] == [True, True, True]


def test_requests_whose_prefix_has_arrived_make_way_for_others(link):
    _, tier = big(link, 4096)
    for number in range(6):
        tier.request_arrived(f"r{number}", prompt(chr(1000 + number) + "abc!"))
        tier.answered(QueryDone(link.queries[-1][0], 4))
    assert len(sent(link, LoadBlocks)) == 4
    for command in sent(link, LoadBlocks)[:2]:
        for rank in range(RANKS):
            tier.answered(LoadDone(command.load_id, rank, 4))
    assert len(sent(link, LoadBlocks)) == 6


def test_requests_that_wait_for_their_prefix_are_counted_until_they_need_not(link):
    now = [0.0]
    manager = CacheManager(KVCacheConfig(256, 256, block_size=1))
    settings = StorageSettings("file", "/unused", min_tokens=1)
    tier = StorageTier(manager, settings, namespace(), link, clock=lambda: now[0])
    counts = [tier.num_waiting_requests]
    for name in ("comes", "leaves", "passes", "late"):
        tier.request_arrived(name, prompt(name + "!"))
        tier.answered(QueryDone(link.queries[-1][0], len(name)))
        counts.append(tier.num_waiting_requests)
    assert counts == [0, 1, 2, 3, 4]
    for rank in range(RANKS):
        tier.answered(LoadDone(sent(link, LoadBlocks)[0].load_id, rank, len("comes")))
    assert tier.num_waiting_requests == 3
    tier.request_left("leaves")
    assert tier.num_waiting_requests == 2
    tier.request_passes("passes")
    assert tier.num_waiting_requests == 1
    now[0] = 1.0
    assert tier.num_waiting_requests == 0, "it may start"


def test_two_pieces_are_stored_at_a_time(link):
    manager, tier = big(link, 256)
    step = compute(manager, tier, long(300))
    for rank in range(RANKS):
        report(tier, step, rank)
    assert [len(command.slots) for command in sent(link, StoreBlocks)] == [32, 32]
    num_stored = 0
    while not tier.is_idle:
        command = sent(link, StoreBlocks)[num_stored]
        num_stored += 1
        for rank in range(RANKS):
            tier.answered(StoreDone(command.store_id, rank, len(command.slots)))
    assert sum(map(len, link.committed)) == 199
    manager.check_idle()


def test_blocks_that_were_computed_meanwhile_do_not_end_a_fetch(link):
    manager, tier = big(link, 256)
    text = long(300)
    tier.request_arrived("r", prompt(text))
    tier.answered(QueryDone(link.queries[-1][0], 199))
    first, second = sent(link, LoadBlocks)
    step = compute(manager, tier, text[:32] + "!")
    for rank in range(RANKS):
        report(tier, step, rank)
    for rank in range(RANKS):
        tier.answered(LoadDone(first.load_id, rank, 32))
    for rank in range(RANKS):
        tier.answered(LoadDone(second.load_id, rank, 32))
    assert manager.count_cached(prompt(text).hashes) == 64
    assert len(sent(link, LoadBlocks)) > 2


RANK_OF_N = [(num_ranks, rank) for num_ranks in (1, 2, 4) for rank in range(num_ranks)]


def tier_of(manager, link, num_ranks, clock=lambda: 0.0):
    link.num_ranks = num_ranks
    return StorageTier(manager, StorageSettings("file", "/unused", min_tokens=1), namespace(), link, clock=clock)


def load(tier, link, number):
    """Begins the load of a request that nothing was computed for."""
    tier.request_arrived(f"r{number}", prompt(f"{number}bc!"))
    tier.answered(QueryDone(link.queries.pop()[0], 3))
    return link.last(LoadBlocks).load_id


def answer_load(tier, link, number, failing=None, *, others_first=False):
    """Every rank answers, `failing` with an error, before the others or after them."""
    load_id = load(tier, link, number)
    for rank in sorted(range(link.num_ranks), key=lambda rank: (rank == failing) == others_first):
        failed = rank == failing
        tier.answered(LoadDone(load_id, rank, 0 if failed else 3, error="no route" if failed else None))
    tier.request_left(f"r{number}")


def answer_store(manager, tier, link, number, failing=None, *, others_first=False):
    step = compute(manager, tier, f"{number}bc!")
    for rank in range(link.num_ranks):
        report(tier, step, rank)
    store_id = link.last(StoreBlocks).store_id
    for rank in sorted(range(link.num_ranks), key=lambda rank: (rank == failing) == others_first):
        failed = rank == failing
        tier.answered(StoreDone(store_id, rank, 0 if failed else 3, error="no route" if failed else None))


@pytest.mark.parametrize("others_first", [False, True])
@pytest.mark.parametrize(("num_ranks", "rank"), RANK_OF_N)
@pytest.mark.parametrize("what", ["load", "store"])
def test_three_loads_or_stores_in_a_row_that_one_rank_fails_open_the_breaker(
    manager, link, caplog, what, num_ranks, rank, others_first
):
    tier = tier_of(manager, link, num_ranks)
    numbers = iter(range(10))

    def answered(failing):
        if what == "load":
            answer_load(tier, link, next(numbers), failing, others_first=others_first)
        else:
            answer_store(manager, tier, link, next(numbers), failing, others_first=others_first)

    for failing, is_left_alone in [(rank, False), (rank, False), (None, False), *[(rank, False)] * 2, (rank, True)]:
        answered(failing)
        assert tier.is_left_alone == is_left_alone
    (line,) = caplog.messages
    assert line == f"the store is left alone for 1 s: rank {rank}: no route"


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_one_load_or_store_that_every_rank_fails_is_one_failure(manager, link, num_ranks):
    tier = tier_of(manager, link, num_ranks)
    for number in range(3):
        assert not tier.is_left_alone
        load_id = load(tier, link, number)
        for rank in range(num_ranks):
            tier.answered(LoadDone(load_id, rank, 0, error="no route"))
    assert tier.is_left_alone
    tier = tier_of(manager, link, num_ranks)
    for number in range(3):
        assert not tier.is_left_alone
        step = compute(manager, tier, f"{number}yz!")
        for rank in range(num_ranks):
            report(tier, step, rank)
        for rank in range(num_ranks):
            tier.answered(StoreDone(link.last(StoreBlocks).store_id, rank, 0, error="no route"))
    assert tier.is_left_alone


@pytest.mark.parametrize(("num_ranks", "silent"), RANK_OF_N)
def test_a_rank_that_never_answers_a_load_opens_the_breaker(manager, link, caplog, num_ranks, silent):
    now = [0.0]
    tier = tier_of(manager, link, num_ranks, clock=lambda: now[0])
    load_id = load(tier, link, 0)
    for rank in range(num_ranks):
        if rank != silent:
            tier.answered(LoadDone(load_id, rank, 3))
    for seconds in (3.0, 6.0, 9.0):
        assert not tier.is_left_alone
        now[0] = seconds
        tier.go_on()
    assert tier.is_left_alone
    (line,) = caplog.messages
    assert line == f"the store is left alone for 1 s: no word from rank {silent} for 9.0 s"
    tier.answered(LoadDone(load_id, silent, 3))
    assert not tier.is_left_alone, "it was slow, and the load has succeeded"
