"""The n-th copy fails, the n-th allocation finds no room, for every n: one copy is lost, and nothing else is wrong.

The real cache manager over one or two ranks, whose blocks hold tags of the whole prefix. Nothing here has a thread.
"""

from __future__ import annotations

import random

import pytest

from fastdeploy_kvcache_v1.errors import TransferError
from fastdeploy_kvcache_v1.metadata import CacheLevel, NoSpace
from tests.scheduler.scenario import manager, prompt
from tests.worker.worker_fakes import NumpyBackend, Rig
from tests.world.clock import Clock
from tests.world.streams import VirtualDevice

PROMPTS = ["abc!", "abcd!", "xy!", "abxy!", "pqrs!", "abcde!", "xyz!", "pq!", "mno!", "abc!", "pqrst!", "xy!"]
"""More blocks than the device has, and more than both tiers have; some come back from the host."""

DEVICE, HOST = 6, 5


class Rank(Rig):
    """Its `failing`-th copy fails, counted from 0 over both streams."""

    def __init__(self, failing: int | None, seed: int = 0) -> None:
        self.failing, self.num_copies, self.failed_in = failing, 0, -1
        self.step, self.random = -1, random.Random(seed)
        super().__init__(VirtualDevice(Clock(), self._fails), device=DEVICE, host=HOST, backend=NumpyBackend(2))

    def _fails(self, stream: str) -> bool:
        fails = self.num_copies == self.failing
        self.num_copies += 1
        if fails:
            self.failed_in = self.step
        return fails

    def compute(self, step, read, written) -> bool:
        """Whether the pass ran: `read` and `written` are contents by slot."""
        self.step = step.step
        self.controller.submit_swap_tasks(step)
        self.runtime.run_some(self.random, 8)
        slots = set(read), set(written)
        ran = True
        try:
            self.controller.before_compute(*slots)
        except TransferError:
            ran = False
        if ran:
            self.runtime.compute_stream.submit(self._pass, read, written)
        self.controller.after_compute(*slots)
        while not self.runtime.is_idle:
            self.runtime.run_some(self.random, 8)
        self.controller.check()
        return ran

    def _pass(self, read, written) -> None:
        wrong = [slot for slot, content in read.items() if not self.holds_all(slot, content)]
        assert not wrong, f"step {self.step} reads other content in {wrong}"
        for slot, content in written.items():
            self.write_all(slot, content)


class Engine:
    """Serves prompts one after another. `late`: of copies to the host it hears before the commit of the step after."""

    def __init__(self, ranks, *, policy="write_back", late=False, full_at=None):
        self.cache, self.ranks, self.late, self.full_at = manager(DEVICE, HOST, policy), ranks, late, full_at
        self.tags, self.untold, self.failed = {}, [], []
        self.num_allocations = 0

    def serve(self, text: str) -> None:
        while not self._try(text):
            pass
        self.cache.check()

    def _try(self, text: str) -> bool:
        cache = self.cache
        found = cache.match_prefix(text, prompt(text)).num_blocks
        if self._finds_no_room(text):
            return False
        step, table = cache.take_swap_step(), cache.block_table(text)
        tags = [self.tags.setdefault(text[:end], len(self.tags) + 1) for end in range(1, len(text))]
        content = list(zip(table, tags, strict=True))
        ran = [rank.compute(step, dict(content[:found]), dict(content[found:])) for rank in self.ranks]
        lost = self._told()
        assert all(ran) or text in lost, "who computes on a block that did not come is told of it before the commit"
        if text in lost:
            cache.preempt(text)
            return False
        cache.commit(text, len(text) - 1)
        cache.finish(text)
        return True

    def _finds_no_room(self, text: str) -> bool:
        cache, self.num_allocations = self.cache, self.num_allocations + 1
        full = self.num_allocations - 1 == self.full_at
        lent = cache.lend(cache.num_available_device_blocks) if full else []
        before = cache.block_table(text), cache.num_free_device_blocks
        no_room = isinstance(cache.allocate(text, len(text) - 1), NoSpace)
        assert full or not no_room
        if no_room:
            assert (cache.block_table(text), cache.num_free_device_blocks) == before, "all or nothing"
            cache.release(text)
        cache.take_back(lent)
        cache.check()
        return no_room

    def _told(self) -> set[str]:
        results = [result for rank in self.ranks for result in rank.controller.take_results() if not result.ok]
        self.failed += results
        heard, self.untold = [*self.untold, *results], []
        if self.late and all(result.target is CacheLevel.HOST for result in results):
            heard = [result for result in heard if result not in results]
            self.untold = results
        return {name for result in heard for name in self.cache.transfer_failed(result)}

    def end(self) -> None:
        """Everything that is cached reads right, by all ranks, and no slot is lost."""
        for text in reversed(PROMPTS):
            self.serve(text)
        self._told()
        self.cache.take_swap_step()
        self.cache.check_idle()
        self.cache.reset_cache()
        assert self.cache.num_free_device_blocks == DEVICE
        assert self.cache.stats().host_free_blocks == HOST
        for rank in self.ranks:
            rank.close()


def live(failing, **options) -> Engine:
    engine = Engine([Rank(each, seed) for seed, each in enumerate(failing)], **options)
    for text in (*PROMPTS, *PROMPTS[::-2]):
        engine.serve(text)
    return engine


@pytest.mark.parametrize(
    ("policy", "late", "ranks"),
    [("write_back", False, 1), ("write_back", True, 2), ("write_through", False, 2), ("write_through", True, 1)],
)
def test_whichever_copy_fails_that_one_is_reported_and_nothing_is_kept_of_it(policy, late, ranks):
    whole = live([None] * ranks, policy=policy, late=late)
    num_copies = whole.ranks[0].num_copies
    whole.end()
    assert whole.failed == []
    assert num_copies > 15
    for rank in range(ranks):
        for copy in range(num_copies):
            failing = [copy if each == rank else None for each in range(ranks)]
            engine = live(failing, policy=policy, late=late)
            engine.end()
            steps = [result.step for result in engine.failed]
            assert steps[0] == engine.ranks[rank].failed_in
            assert engine.failed[0].error == "TransferError: injected"
            assert all("the copy it depends on failed" in result.error for result in engine.failed[1:])
            assert late or set(steps) == {steps[0]}, "the engine heard of it before it built on it"
            assert engine.cache.stats().counters.failed_transfer_blocks > 0


@pytest.mark.parametrize("policy", ["write_back", "write_through"])
def test_whichever_allocation_finds_no_room_takes_nothing(policy):
    """But for prompts that are on the device as a whole, which need no room."""
    num_allocations, refused = live([None], policy=policy).num_allocations, 0
    for number in range(num_allocations):
        engine = live([None], policy=policy, full_at=number)
        refused += engine.num_allocations - num_allocations
        engine.end()
        assert engine.failed == []
    assert refused > num_allocations // 2
