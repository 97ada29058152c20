"""Words for scenarios: a prompt is a text, a block is one of its characters with everything before it."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import (
    Allocation,
    BlockCopies,
    BlockHash,
    CacheAccess,
    CacheLevel,
    CopyResult,
    DeviceSlot,
    LoadSlots,
    MatchResult,
    NoSpace,
    StoreSource,
    SwapStep,
)
from fastdeploy_kvcache_v1.contract.misses import MissReason, StoredPrefix
from fastdeploy_kvcache_v1.errors import PoolInUseError
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.run import Run


def manager(device: int, host: int = 0, policy: str = "write_back", **options: Any) -> CacheManager:
    """What leaves next is the oldest, unless `options` say otherwise: tests know that order. It is a second later each
    time that the manager looks at its clock.
    """
    options.setdefault("eviction_policy", "lru")
    config = KVCacheConfig(device, host, block_size=1, write_policy=WritePolicy(policy), **options)
    return CacheManager(config, clock=count().__next__)


def prompt(text: str) -> GivenHashes:
    """One block per character; the last character is the token that is always computed."""
    return GivenHashes([BlockHash(text[: end + 1].encode()) for end in range(len(text))], len(text))


ACCESS = {
    "w/r": CacheAccess(reads=False),
    "r/w": CacheAccess(writes=False),
    "none": CacheAccess(reads=False, writes=False),
}
"""By a request's name: it writes without reading, reads without writing, or does neither."""


def limited(text: str, name: str) -> GivenHashes:
    sequence = prompt(text)
    sequence.access = ACCESS.get(name, CacheAccess())
    return sequence


def block(text: str) -> BlockHash:
    """Name of the last block of `text`."""
    return BlockHash(text.encode())


def start(cache: CacheManager, text: str, name: str = "") -> MatchResult:
    """Match and allocate all blocks but the last one; returns the match."""
    match = cache.match_prefix(name or text, prompt(text))
    assert isinstance(cache.allocate(name or text, len(text) - 1), Allocation)
    return match


def run(cache: CacheManager, text: str, name: str = "") -> SwapStep:
    """A whole request: its blocks, all but the last one, end up cached."""
    name = name or text
    start(cache, text, name)
    step = cache.take_swap_step()
    cache.commit(name, len(text) - 1)
    cache.finish(name)
    cache.check()
    return step


def runs_of(cache: CacheManager, name: str) -> list[Run]:
    """Of the cached blocks that a request uses."""
    return cache._requests[name].leaf.path()


def cached(cache: CacheManager, text: str) -> list[str]:
    """Tier of each block of the longest cached prefix."""
    cache.match_prefix("probe", prompt(text + "!"))
    found = ["device" if run.on_device else "host" for run in runs_of(cache, "probe") for _ in run.hashes]
    cache.release("probe")
    return found


def fail(cache: CacheManager, step: SwapStep, target: CacheLevel, slots: Iterable[int]) -> list[str]:
    """The copies of `step` into `slots` of tier `target` failed."""
    source = CacheLevel.HOST if target is CacheLevel.DEVICE else CacheLevel.DEVICE
    return cache.transfer_failed(CopyResult(step.step, source, target, 1, 0, 0.0, tuple(slots), "injected"))


def on_host(cache: CacheManager, text: str) -> list[bool]:
    """Which blocks of `text`, all of them cached, have a host copy."""
    cache.match_prefix("probe", prompt(text + "!"))
    has_copy = [run.host is not None for run in runs_of(cache, "probe") for _ in run.hashes]
    cache.release("probe")
    assert len(has_copy) == len(text)
    return has_copy


# ---- scenarios in words


def tiers(run: Run) -> str:
    """A letter for each block: on the device (D), on the host only (H), on its way there (o), or from there (i), or
    forgotten (x).
    """
    if run.detached:
        return "x" * run.length
    on_its_way = {CacheLevel.HOST: "o", CacheLevel.DEVICE: "i", None: ""}[run.open]
    return (on_its_way or ("D" if run.on_device else "H")) * run.length


def play(events: str, device: int, host: int = 0, policy: str = "write_back", **options: Any) -> Scene:
    """A scene on a cache of this size in which `events` have happened, see `Scene.play`."""
    scene = Scene(manager(device, host, policy, **options))
    scene.play(events)
    return scene


def play_law(law: str, **options: Any) -> Scene:
    """Of sizes, `:` and events. Sizes: device blocks, `+`, host blocks, and a write policy if it is not write back."""
    sizes, events = law.split(":")
    blocks, *policy = sizes.split()
    return play(events, *map(int, blocks.split("+")), *policy, **options)


class Scene:
    """A manager, and what can happen to it.

    A prompt is written without the token that is always computed: `ab` has the blocks `a` and `ab`. A request without a
    name is called as its prompt. A step may get a name, by which later events speak of its copies.
    """

    def __init__(self, cache: CacheManager) -> None:
        self.cache = cache
        self.steps: dict[str, SwapStep] = {}
        self.load_slots = LoadSlots((), -1)
        self.lent: list[DeviceSlot] = []

    def play(self, events: str) -> None:
        """Events separated by `;`, each a method and its arguments; the manager is checked after each."""
        for event in events.split(";"):
            word, *arguments = event.split()
            try:
                getattr(self, word)(*arguments)
                self.cache.check()
            except AssertionError as error:
                raise AssertionError(f"at `{event.strip()}` of `{events}`: {error}") from error

    # ---- requests

    def match(self, text: str, name: str = "", found: str = "") -> None:
        """`found`: how many blocks."""
        match = self.cache.match_prefix(name or text, limited(text + "!", name))
        assert found in ("", str(match.num_blocks))

    def start(self, text: str, name: str = "", hits: str = "") -> None:
        """Match, and all blocks are allocated. `hits`: tokens found on the device, `+`, tokens found on the host."""
        self.match(text, name)
        allocation = self.cache.allocate(name or text, len(text))
        assert isinstance(allocation, Allocation), "no space"
        assert hits in ("", f"{allocation.num_device_tokens}+{allocation.num_host_tokens}")

    def run(self, text: str, name: str = "") -> None:
        """A whole request: its blocks end up cached."""
        self.start(text, name)
        self.step()
        self.commit(name or text, len(text))
        self.finish(name or text)

    def grow(self, name: str, tokens: str) -> None:
        assert isinstance(self.cache.allocate(name, int(tokens)), Allocation), "no space"

    def full(self, name: str, tokens: str, needed: str = "", available: str = "") -> None:
        refused = self.cache.allocate(name, int(tokens))
        assert isinstance(refused, NoSpace)
        assert needed == "" or (refused.needed, refused.available) == (int(needed), int(available))

    def commit(self, name: str, tokens: str | int) -> None:
        self.cache.commit(name, int(tokens))

    def finish(self, name: str) -> None:
        self.cache.finish(name)

    def preempt(self, name: str) -> None:
        self.cache.preempt(name)

    def release(self, name: str) -> None:
        self.cache.release(name)

    def waiting(self, *line: str) -> None:
        """Requests wait with these prompts, the next one first."""
        self.cache.expect([prompt(text + "!") for text in line])

    # ---- the worker

    def step(self, name: str = "last") -> None:
        self.steps[name] = self.steps["last"] = self.cache.take_swap_step()

    def out(self, *copies: str) -> None:
        """Copies to the host in the last step: how many, or each as `source>target`."""
        self._copied(self.steps["last"].swap_out, copies)

    def into(self, *copies: str) -> None:
        """Copies to the device in the last step."""
        self._copied(self.steps["last"].swap_in, copies)

    def refilled(self, *slots: str) -> None:
        """Host slots that the last step names as filled by loads."""
        assert list(map(str, self.steps["last"].refilled)) == list(slots), self.steps["last"].refilled

    def _copied(self, swap: BlockCopies, copies: tuple[str, ...]) -> None:
        made = [f"{source}>{target}" for source, target in zip(swap.source_slots, swap.target_slots, strict=True)]
        assert list(copies) in ([str(len(swap))], sorted(made)), made

    def fail(self, step: str, tier: str, which: str, *named: str) -> None:
        """Copies into `tier` failed: `all`, or their places in the step. It concerns these requests."""
        level = CacheLevel(tier)
        targets = (self.steps[step].swap_out if level is CacheLevel.HOST else self.steps[step].swap_in).target_slots
        slots = targets if which == "all" else [targets[int(place)] for place in which.split(",")]
        found = fail(self.cache, self.steps[step], level, slots)
        assert found == list(named), found

    # ---- lent slots

    def lend(self, count: str) -> None:
        slots = self.cache.lend(int(count))
        assert not isinstance(slots, NoSpace), "no space"
        self.lent += slots

    def refuse(self, count: str) -> None:
        assert isinstance(self.cache.lend(int(count)), NoSpace)

    def are_lent(self, *slots: str) -> None:
        assert self.cache.lent_slots() == set(map(int, slots))

    def adopt(self, name: str, *slots: str) -> None:
        adopted = [DeviceSlot(int(slot)) for slot in slots]
        self.cache.adopt(name, adopted)
        self.lent = [slot for slot in self.lent if slot not in adopted]

    def back(self) -> None:
        slots, self.lent = self.lent, []
        self.cache.take_back(slots)

    def push(self, free: str) -> None:
        """Until so many device slots are free, blocks leave."""
        self.lend(free)
        self.back()

    def flush(self) -> None:
        """Every block that can leaves the device, and the step is taken."""
        self.push(str(self.cache.num_available_device_blocks))
        self.step()

    # ---- loads and stores

    def load(self, text: str, first: str = "0", tier: str = "host", name: str = "load") -> None:
        result = self.cache.begin_load(name, prompt(text).hashes, int(first), level=CacheLevel(tier))
        assert isinstance(result, LoadSlots), result
        self.load_slots = result

    def lent_to_load(self, count: str, after: str = "") -> None:
        """Slots of the last load, and the step after which bytes may come."""
        assert len(self.load_slots.slots) == int(count)
        assert after in ("", str(self.load_slots.after_step)), self.load_slots

    def no_load(self, text: str, first: str, tier: str, needed: str) -> None:
        result = self.cache.begin_load("refused", prompt(text).hashes, int(first), level=CacheLevel(tier))
        assert result == NoSpace(int(needed), 0)

    def arrive(self, count: str, cached: str, name: str = "load") -> None:
        """So many blocks are there; so many become cached."""
        found = self.cache.complete_load(name, int(count))
        assert found == int(cached), found

    def store(self, step: str, blocks: str, name: str = "store") -> None:
        """Of what `step` copied to the host these blocks are read, named with commas; `-` for none."""
        copied = self.steps[step]
        source = self.cache.begin_store(name, copied.step, frozenset(copied.swap_out.target_slots))
        self._reads(source, "host_slots", blocks)

    def store_on_device(self, text: str, first: str, blocks: str, name: str = "store") -> None:
        self._reads(self.cache.begin_device_store(name, prompt(text).hashes, int(first)), "device_slots", blocks)

    def store_on_host(self, text: str, first: str, blocks: str, name: str = "store") -> None:
        self._reads(self.cache.begin_host_store(name, prompt(text).hashes, int(first)), "host_slots", blocks)

    def _reads(self, source: StoreSource, place: str, blocks: str) -> None:
        found = ",".join(name.decode() for name in source.hashes) or "-"
        assert found == blocks, found
        slots = {}
        for each in self.cache._tree.runs():
            slots.update(zip(each.hashes, getattr(each, place), strict=False))  # it may be in the other tier only
        assert [slots[name] for name in source.hashes] == list(source.slots)

    def end(self, name: str = "store") -> None:
        self.cache.end_store(name)

    # ---- administration

    def reset(self, how: str = "") -> None:
        self.cache.reset_cache(force=how == "forced", new_weights=how == "weights")

    def weights(self) -> None:
        self.cache.weights_changed()

    def resize(self, size: str) -> None:
        self.cache.resize_device_pool(int(size))

    def stuck(self, size: str) -> None:
        """The pool cannot have this size now, and nothing changes."""
        before = self.cache.stats()
        try:
            self.cache.resize_device_pool(int(size))
        except PoolInUseError:
            assert self.cache.stats() == before
        else:
            raise AssertionError("it was resized")

    # ---- what is to be seen

    def see(self, text: str, letters: str) -> None:
        """What a match finds, a letter for each block, see `tiers`; `-` for nothing."""
        self.match(text, "probe")
        try:
            self.uses("probe", letters)
        finally:
            self.release("probe")

    def uses(self, name: str, letters: str) -> None:
        """As `see`, of the blocks that a request has now."""
        found = "".join(map(tiers, runs_of(self.cache, name))) or "-"
        assert found == letters, found

    def copied(self, text: str, copies: str) -> None:
        """Whether each block of `text` has a host copy: `y` or `n`."""
        found = "".join("ny"[has] for has in on_host(self.cache, text))
        assert found == copies, found

    def table(self, name: str, *slots: str) -> None:
        assert self.cache.block_table(name) == [int(slot) for slot in slots], self.cache.block_table(name)

    def shape(self, *runs: str) -> None:
        """Each run, by the last letters of its blocks."""
        found = [b"".join(block[-1:] for block in run.hashes).decode() for run in self.cache._tree.runs()]
        assert sorted(found) == sorted(runs), found

    def count(self, name: str, value: str) -> None:
        stats = self.cache.stats()
        found = getattr(stats, name, None)
        found = getattr(stats.counters, name) if found is None else found
        assert found == int(value), found

    def hits(self, *counted: str) -> None:
        """Requests admitted, tokens found on the device and on the host, tokens asked for."""
        counters = self.cache.stats().counters
        hits = counters.requests_admitted, counters.device_hit_tokens, counters.host_hit_tokens, counters.query_tokens
        assert hits == tuple(map(int, counted)), hits

    def missed(self, name: str, reason: str, *rest: str) -> None:
        """Why a request missed its first block, then the token, tokens missed, tier last held, and blocks short."""
        miss = self.cache.miss(name)
        assert miss is not None, "no miss is known"
        tier = None if miss.tier_last_held is None else miss.tier_last_held.value
        found = miss.reason.value, miss.at_token, miss.num_tokens, tier, miss.blocks_short
        assert tuple(map(str, found))[: len(rest) + 1] == (reason, *rest), found

    def reasons(self, *counts: str) -> None:
        """Missed tokens as `reason=tokens`, all those above 0."""
        found = {f"{reason}={tokens}" for reason, tokens in vars(self.cache.misses.tokens).items() if tokens}
        assert found == set(counts), found

    def stored(self, name: str, end: str, reason: str, beyond: str = "") -> None:
        """The storage tier has the first `end` blocks. `-` for no reason."""
        reasons = [MissReason(each) if each.strip("-") else None for each in (reason, beyond)]
        self.cache.tell_stored(name, StoredPrefix(int(end), *reasons))

    def idle(self) -> None:
        """Nothing is held once the next step is taken."""
        self.step()
        self.cache.check_idle()
