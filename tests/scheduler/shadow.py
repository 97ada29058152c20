"""A slow, obvious model of everything around the cache manager: the requests, the worker's memory, an outside index.

Memory holds, for every token of every slot, the whole prefix that KV was computed from. Whatever a request is about to
read must be its own prefix: that is the entire meaning of "this cache never changes a token".
"""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_kvcache_v1.metadata import (
    BlockHash,
    CacheAccess,
    CacheEvent,
    CacheLevel,
    DeviceSlot,
    NoSpace,
    StoreSource,
    SwapStep,
    TransferResult,
)
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import BlockHasher

Prefix = tuple[int, ...]
GARBAGE: Prefix = (-1,)


@dataclass
class ShadowRequest:
    tokens: list[int]
    hasher: BlockHasher
    admitted: bool = False
    computed: int = 0
    allocated: int = 0
    closed: int = 0
    """Tokens allocated before the step that is being decided."""
    adopted: int = 0
    """Tokens in adopted slots and before them: the borrower knows when they are computed, the manager does not ask."""


@dataclass
class ShadowLoad:
    tokens: list[int]
    first: int
    """Block of the prompt that goes into the first slot."""
    level: CacheLevel
    slots: tuple[int, ...]
    after_step: int
    cancelled: bool = False


class Shadow:
    """Drives a manager as an engine would, and verifies what the worker's memory holds."""

    def __init__(self, manager: CacheManager) -> None:
        self.manager = manager
        self.block_size = manager.config.block_size
        self.device: dict[int, list[Prefix]] = {}
        self.host: dict[int, list[Prefix]] = {}
        self.requests: dict[str, ShadowRequest] = {}
        self.loads: dict[str, ShadowLoad] = {}
        self.stores: dict[str, tuple[StoreSource, list[list[Prefix]]]] = {}
        """What each store reads, and what was there when it began."""
        self.backed_up: dict[int, frozenset[int]] = {}
        """Host slots that a step was the last to fill, by its number."""
        self.unreported: list[TransferResult] = []
        """Copies that failed and of which the manager was not told yet: it may be late, but never after the commit of
        what was computed on top.
        """
        self.content: dict[BlockHash, list[Prefix]] = {}
        """What each block holds, by its name."""
        self.index: dict[CacheLevel, set[BlockHash]] = {CacheLevel.DEVICE: set(), CacheLevel.HOST: set()}
        self.next_step = 0

    # ---- requests

    def hashed(self, tokens: list[int], access: CacheAccess | None = None) -> BlockHasher:
        hasher = BlockHasher(self.block_size, access=access or CacheAccess())
        hasher.extend(tokens)
        self.learn(hasher, tokens)
        return hasher

    def learn(self, hasher: BlockHasher, tokens: list[int]) -> None:
        for index, block in enumerate(hasher.hashes):
            if block not in self.content:
                positions = range(index * self.block_size, (index + 1) * self.block_size)
                self.content[block] = [tuple(tokens[: position + 1]) for position in positions]

    def match(
        self,
        request_id: str,
        tokens: list[int],
        *,
        max_blocks: int | None = None,
        resumed: bool = False,
        access: CacheAccess | None = None,
    ) -> int:
        hasher = self.hashed(tokens, access)
        result = self.manager.match_prefix(request_id, hasher, max_blocks=max_blocks, resumed=resumed)
        self.requests[request_id] = ShadowRequest(list(tokens), hasher)
        assert result.num_tokens < len(tokens), "the last token is always computed"
        assert max_blocks is None or result.num_blocks <= max_blocks
        assert [node.hash for node in self.manager.nodes(request_id)] == hasher.hashes[: result.num_blocks]
        return result.num_blocks

    def allocate(self, request_id: str, num_tokens: int) -> bool:
        request = self.requests[request_id]
        before = self.manager.block_table(request_id)
        result = self.manager.allocate(request_id, num_tokens)
        if isinstance(result, NoSpace):
            assert result.needed > result.available
            assert self.manager.block_table(request_id) == before
            return False
        if not request.admitted:
            request.admitted = True
            request.computed = result.num_cached_tokens
        request.allocated = max(request.allocated, num_tokens)
        table = self.manager.block_table(request_id)
        assert len(set(table)) == len(table) == self.manager.num_blocks(request_id)
        assert table[: len(before)] == before, "a block table only grows at its end"
        assert table[len(table) - len(result.new_blocks) :] == result.new_blocks
        return True

    def adopt(self, request_id: str, slots: list[DeviceSlot]) -> None:
        """Lent slots become the end of the request's block table, as with a scheduler that has tables of its own."""
        table = self.manager.block_table(request_id)
        self.manager.adopt(request_id, slots)
        assert self.manager.block_table(request_id) == [*table, *slots]
        request = self.requests[request_id]
        request.allocated = request.adopted = (len(table) + len(slots)) * self.block_size

    def step(self) -> SwapStep:
        step = self.manager.take_swap_step()
        assert step.step == self.next_step
        self.next_step += 1
        for request in self.requests.values():
            request.closed = request.allocated
        self.apply(step)
        return step

    def apply(self, step: SwapStep) -> None:
        """The worker's order: all evictions, then all swap-ins. A copy of garbage fails."""
        assert len(set(step.evict.target_slots)) == len(step.evict)
        assert len(set(step.swap_in.target_slots)) == len(step.swap_in)
        evicted = [list(self.device[slot]) for slot in step.evict.source_slots]
        self.host.update(zip(step.evict.target_slots, evicted, strict=True))
        filled_now = frozenset(step.evict.target_slots)
        self.backed_up = {number: slots - filled_now for number, slots in self.backed_up.items()}
        self.backed_up[step.step] = filled_now
        filled = [list(self.host[slot]) for slot in step.swap_in.source_slots]
        self.device.update(zip(step.swap_in.target_slots, filled, strict=True))
        for swap, memory in ((step.evict, self.host), (step.swap_in, self.device)):
            if unread := [slot for slot in swap.target_slots if memory[slot] == self.garbage]:
                self.spoil(step, swap.target, unread)

    def compute(self, request_id: str, upto: int, sample: int) -> None:
        """The forward pass over tokens [computed, upto), then what the engine does with its result."""
        request = self.requests[request_id]
        table = self.manager.block_table(request_id)
        self.verify(request_id)
        assert not self.reads_garbage(request_id), "a pass over it fails"
        for position in range(request.computed, upto):
            block = self.device.setdefault(table[position // self.block_size], [GARBAGE] * self.block_size)
            block[position % self.block_size] = tuple(request.tokens[: position + 1])
        request.computed = max(request.computed, upto)
        if request.computed == len(request.tokens):
            request.tokens.append(sample)
            request.hasher.extend((sample,))
            self.learn(request.hasher, request.tokens)
        self.manager.commit(request_id, request.computed)

    def reads_garbage(self, request_id: str) -> bool:
        """Whether what the worker was told to read for it was to be filled by a copy that failed."""
        request = self.requests[request_id]
        num_blocks = -(-request.computed // self.block_size) if request.closed else 0
        return any(self.device[slot] == self.garbage for slot in self.manager.block_table(request_id)[:num_blocks])

    def verify(self, request_id: str) -> None:
        """Everything attention of this request would read is its own prefix, or known to the worker as garbage."""
        request = self.requests[request_id]
        table = self.manager.block_table(request_id)
        for position in range(request.computed):
            block = self.device[table[position // self.block_size]]
            if not (self.unreported and block == self.garbage):
                held = block[position % self.block_size]
                assert held == tuple(request.tokens[: position + 1]), f"{request_id} would read wrong KV at {position}"

    def verify_all(self) -> None:
        """Everything that can be found holds what its name says, or the manager will hear of it."""
        for run in self.manager._tree.runs():
            for memory, level, slots in (
                (self.device, CacheLevel.DEVICE, run.device_slots),
                (self.host, CacheLevel.HOST, run.host_slots),
            ):
                if run.open is not level:
                    for block, slot in zip(run.hashes, slots, strict=bool(slots)):
                        is_right = memory[slot] == self.content[block]
                        assert is_right or (self.unreported and memory[slot] == self.garbage), f"{level} slot {slot}"

    def end(self, request_id: str, how: str) -> list[int]:
        """`finish`, `preempt` or `release`; returns its tokens."""
        getattr(self.manager, how)(request_id)
        return self.requests.pop(request_id).tokens

    # ---- failures

    @property
    def garbage(self) -> list[Prefix]:
        """What a copy that fails leaves in a slot."""
        return [GARBAGE] * self.block_size

    def spoil(self, step: SwapStep, level: CacheLevel, slots: list[int]) -> None:
        """The copies of `step` into `slots` of tier `level` fail; the manager does not know yet."""
        memory = self.device if level is CacheLevel.DEVICE else self.host
        for slot in slots:
            memory[slot] = self.garbage
        if level is CacheLevel.HOST:  # nobody may store what that step copied
            self.backed_up.pop(step.step, None)
        source = CacheLevel.HOST if level is CacheLevel.DEVICE else CacheLevel.DEVICE
        failed = TransferResult(step.step, source, level, len(slots), 0, 0.0, tuple(slots), "injected")
        self.unreported.append(failed)

    def report(self) -> list[str]:
        """Tell the manager of the oldest failure; returns the requests that it names."""
        return self.manager.transfer_failed(self.unreported.pop(0))

    # ---- loads

    def begin_load(self, load_id: str, tokens: list[int], first: int, level: CacheLevel) -> bool:
        hasher = self.hashed(tokens)
        result = self.manager.begin_load(load_id, hasher.hashes, first, level=level)
        if isinstance(result, NoSpace):
            assert result == NoSpace(len(hasher.hashes) - first, 0)
            return False
        assert 0 < len(result.slots) == len(set(result.slots)) <= len(hasher.hashes) - first
        assert result.after_step < self.next_step or level is CacheLevel.DEVICE
        self.loads[load_id] = ShadowLoad(tokens, first, level, result.slots, result.after_step)
        return True

    def may_arrive(self, load_id: str) -> bool:
        return self.loads[load_id].after_step < self.next_step

    def arrive(self, load_id: str, index: int, *, garbage: bool = False) -> None:
        """The bytes of block `index` of a load are written: its own, or those of a transfer that goes wrong."""
        load = self.loads[load_id]
        assert self.may_arrive(load_id)
        memory = self.device if load.level is CacheLevel.DEVICE else self.host
        begin = (load.first + index) * self.block_size
        own = [tuple(load.tokens[: position + 1]) for position in range(begin, begin + self.block_size)]
        memory[load.slots[index]] = [GARBAGE] * self.block_size if garbage else own

    def complete_load(self, load_id: str, num_arrived: int) -> int:
        for index in range(num_arrived):
            self.arrive(load_id, index)
        for index in range(num_arrived, len(self.loads[load_id].slots) if self.may_arrive(load_id) else 0):
            self.arrive(load_id, index, garbage=True)
        load = self.loads.pop(load_id)
        num_cached = self.manager.complete_load(load_id, num_arrived)
        assert 0 <= num_cached <= (0 if load.cancelled else num_arrived)
        return num_cached

    def cancel_load(self, load_id: str) -> None:
        self.manager.cancel_load(load_id)
        self.loads[load_id].cancelled = True

    # ---- stores

    def begin_store(self, store_id: str, step: int) -> int:
        """Of what `step` copied to the host; returns how many blocks of it are there still."""
        source = self.manager.begin_store(store_id, step, self.backed_up[step])
        assert self.backed_up[step].issuperset(source.slots)
        for block, slot in zip(source.hashes, source.slots, strict=True):
            hasher = BlockHasher(self.block_size)
            hasher.extend(self.host[slot][-1])
            assert hasher.hashes[-1] == block, "a store would put a block under the name of another one"
        if source.slots:
            self.stores[store_id] = source, [list(self.host[slot]) for slot in source.slots]
        return len(source.slots)

    @property
    def num_stored_slots(self) -> int:
        """Host slots that stores read: several may read the same one, until a reset makes it one store's."""
        return len({slot for source, _ in self.stores.values() for slot in source.slots})

    def end_store(self, store_id: str) -> None:
        source, before = self.stores.pop(store_id)
        assert [self.host[slot] for slot in source.slots] == before, "a slot was filled while a store read it"
        self.manager.end_store(store_id)

    def lose_step(self) -> None:
        """A step that never reaches the worker: the engine computes nothing of it, and trusts no cached block."""
        assert self.manager.take_swap_step().step == self.next_step
        self.next_step += 1
        self.reset(force=False)

    def reset(self, *, force: bool) -> None:
        self.manager.reset_cache(force=force)
        for load in self.loads.values():
            load.cancelled = True
        if force:
            self.requests.clear()

    # ---- the outside index

    def follow_events(self) -> None:
        for event in self.manager.take_events():
            self.follow(event)

    def follow(self, event: CacheEvent) -> None:
        if event.kind == "cleared":
            for known in self.index.values():
                known.clear()
            return
        assert event.level is not None
        known = self.index[event.level]
        if event.kind == "stored":
            assert known.isdisjoint(event.hashes), "stored twice"
            known.update(event.hashes)
        else:
            assert known.issuperset(event.hashes), "removed without having been stored"
            known.difference_update(event.hashes)

    def expected_match(self, tokens: list[int]) -> int:
        """Longest prefix the outside index knows in any tier."""
        hasher = BlockHasher(self.block_size)
        hasher.extend(tokens)
        known = self.index[CacheLevel.DEVICE] | self.index[CacheLevel.HOST]
        blocks = 0
        for digest in hasher.hashes[: (len(tokens) - 1) // self.block_size]:
            if digest not in known:
                break
            blocks += 1
        return blocks
