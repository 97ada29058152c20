"""Stores behind the real storage tier: slow, failing, full, forgetful or lying, as the faults say.

One names blocks by their hashes and uses host slots, the other by token ids and device slots. Commands of a kind are
answered in order, those of different kinds in any. A call that failed goes on writing or reading for a while.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.storage import RankStorage
from fastdeploy_kvcache_v1.metadata import CacheLevel
from fastdeploy_kvcache_v1.scheduler.cache_utils import BlockHasher
from fastdeploy_kvcache_v1.storage.attention_store.tasks import FlushDone, MatchTask, ReadStorageTask, WriteDone
from fastdeploy_kvcache_v1.storage.messages import LoadBlocks, LoadDone, QueryDone, StoreBlocks, StoreDone, UseNamespace
from fastdeploy_kvcache_v1.storage.namespace import Namespace

from .chooser import pick
from .memory import GARBAGE, WrongError

LATE_S = 2.0
"""How long a call that failed goes on."""

Value = list[Any]
"""By rank."""


def namespace() -> Namespace:
    layout = CacheLayout(2, (RoleSpec("key", (2, 4, 8), "float32"),))
    return Namespace(
        model="m", weight_epoch="0", layout=layout, block_size=4, tensor_parallel_size=1, implementation="world",
        hash_version="1",
    )  # fmt: skip


class RankMemory(RankStorage):
    """The slots of one rank that the store reads and fills."""

    def __init__(self, *, on_device: bool) -> None:
        self.uses_device_tier = on_device
        self._controller: Any = None
        self.rank: Any = None

    def use(self, controller: Any) -> None:
        self._controller = controller

    def let_go(self) -> bool:
        return True

    def read(self, slot: int) -> Any:
        return np.stack(self._rows(slot))

    def fill(self, slot: int, value: Any) -> None:
        for number, row in enumerate(self._rows(slot)):
            row[:] = GARBAGE if np.isscalar(value) else value[number]

    def _rows(self, slot: int) -> Sequence[Any]:
        """What it holds, part by part."""
        if not self.uses_device_tier:
            return [self._controller.host_pool.block(slot).view(np.int64)]
        return [role.array[slot].view(np.int64) for rows in self._controller.transfers.device_rows for role in rows]

    def refilled(self, slots: Sequence[int]) -> None:
        self._controller.transfers.refilled(slots, CacheLevel.DEVICE if self.uses_device_tier else CacheLevel.HOST)


class Store:
    """A `Link`, and the store at its other end. `memories`: of each rank."""

    is_ready = True
    tier: Any = None
    """At the engine, which is idle when no slot is lent to the store."""

    def __init__(self, world: Any, memories: Sequence[RankMemory]) -> None:
        self._world, self._memories, self.num_ranks = world, memories, len(memories)
        self.namespace = ""
        self.values: dict[Hashable, Value] = {}
        self.index: set[tuple[int, ...]] = set()
        """Paths of blocks that the server says it has."""
        self.kinds: list[deque[Any]] = [deque() for _ in range(4)]
        """Questions, loads, stores and statements that wait for their answer."""
        self._late: list[tuple[float, Sequence[int], list[Value] | None]] = []
        """Calls that failed and go on for so long: they read these values from the slots, or fill them."""
        self._listener: Callable[[Any], None] = print

    # ---- the link

    def listen(self, listener: Callable[[Any], None]) -> None:
        self._listener = listener

    def close(self) -> None:
        pass

    def query(self, query_id: str, hashes: Sequence[Hashable]) -> None:
        self.kinds[0].append((self.namespace, query_id, tuple(hashes)))

    def commit(self, hashes: Sequence[Hashable]) -> None:
        """Blocks of this world are stored by all ranks at once."""

    def touch(self, hashes: Sequence[Hashable]) -> None:
        pass

    def send(self, command: Any) -> None:
        if isinstance(command, UseNamespace):
            self.namespace = command.namespace.digest
        else:
            self.kinds[self._kind(command)].append((self.namespace, command))
            self._begin(command)

    def _begin(self, command: Any) -> None:
        """Its slots may be read or filled from now on."""

    def _kind(self, command: Any) -> int:
        assert isinstance(command, LoadBlocks | StoreBlocks)
        return 1 if isinstance(command, LoadBlocks) else 2

    # ---- the world's end

    @property
    def events(self) -> list[Any]:
        return [(12, self.answer), (5, self.go_on), (0.5, self.lose)]

    @property
    def is_idle(self) -> bool:
        return not any(self.kinds) and (self.tier is None or self.tier.is_idle)

    def check_idle(self) -> None:
        pass

    def answer(self, rng: random.Random) -> None:
        """One command."""
        strike = self._world.faults.strike
        fails, lies, full = (strike(name, rng) for name in ("store fails", "store lies", "store is full"))
        at, cut = rng.random(), rng.random()
        kind = pick((each for each in range(4) if self.kinds[each]), at)
        if kind is None:
            return
        answer = (self._answer_question, self._answer_load, self._answer_store, self._answer_statement)[kind]
        for each in answer(fails, lies if kind == 1 else full, cut, *self.kinds[kind].popleft()):
            self._world.log("store", each)
            self._listener(each)

    def lose(self, rng: random.Random) -> None:
        name = pick(self.values, rng.random())
        if self._world.faults.strike("store loses", rng) and name is not None:
            del self.values[name]

    def go_on(self, rng: random.Random) -> None:
        """What calls that failed still do."""
        self._late = [late for late in self._late if late[0] > self._world.clock()]
        for _, slots, values in self._late:
            if values is None:
                self._spoil(slots)
            elif not all(_equal(self._read(slot), value) for slot, value in zip(slots, values, strict=True)):
                raise WrongError(f"slots {slots} changed while the store reads them")

    def _read(self, slot: int) -> Value:
        return [memory.read(slot) for memory in self._memories]

    def _spoil(self, slots: Sequence[int]) -> None:
        for memory in self._memories:
            for slot in slots:
                memory.fill(slot, GARBAGE)

    def _fill(self, slots: Sequence[int], values: Sequence[Value]) -> None:
        """All `slots`, with garbage where there is no value."""
        self._spoil(slots)
        for slot, value in zip(slots, values, strict=False):
            for memory, part in zip(self._memories, value, strict=True):
                memory.fill(slot, part)
        for memory in self._memories:
            memory.refilled(slots[: len(values)])

    def _keep(self, name: Hashable, slot: int) -> bool:
        """Whether it was not there before."""
        value = self._read(slot)
        known = self.values.setdefault(name, value)
        if not _equal(known, value):
            raise WrongError(f"slot {slot} is stored under the name of another block")
        return known is value

    def _stored(self, names: Sequence[Hashable]) -> list[Value]:
        found = []
        for name in names:
            if name not in self.values:
                break
            found.append(self.values[name])
        return found

    # ---- answers; `wrong`: of a load its first value lies, of a store there is no room

    def _answer_question(self, fails: bool, _: bool, __: float, space: str, *question: Any) -> list[Any]:
        name, found = self._found(space, *question)
        return [QueryDone(name, 0, error="no route to host") if fails else QueryDone(name, found)]

    def _found(self, space: str, name: str, hashes: Any) -> tuple[str, int]:
        return name, len(self._stored([(space, each) for each in hashes]))

    def _answer_load(self, fails: bool, wrong: bool, cut: float, space: str, command: Any) -> list[Any]:
        values = self._stored(self._names(space, command))[: len(self._slots(command))]
        if fails or wrong:
            values = values[: int(cut * len(values))]
        self._fill(self._slots(command), values)
        quiet_after = LATE_S if fails and self._goes_on and cut < 0.7 else 0.0
        if quiet_after:
            self._late.append((self._world.clock() + LATE_S, self._slots(command), None))
        error = "connection reset" if fails else None
        count = 0 if quiet_after else len(values)
        load = self._name(command)
        return [LoadDone(load, rank, count, wrong, 0, 0.01, error, quiet_after) for rank in range(self.num_ranks)]

    def _answer_store(self, fails: bool, wrong: bool, _: float, space: str, command: Any) -> list[Any]:
        error = "disk full" if fails or wrong else None
        slots = self._slots(command)
        if error is None:
            for name, slot in zip(self._names(space, command), slots, strict=True):
                self._keep(name, slot)
        return [self._store_done(self._name(command), rank, len(slots), error) for rank in range(self.num_ranks)]

    def _store_done(self, name: str, rank: int, count: int, error: str | None) -> Any:
        return StoreDone(name, rank, count, error=error)

    def _answer_statement(self, fails: bool, _: bool, __: float, space: str, command: Any) -> list[Any]:
        raise AssertionError("only an index is told so")

    _goes_on = False
    """Whether a failed call may go on."""

    def _name(self, command: Any) -> str:
        return str(command.load_id if isinstance(command, LoadBlocks) else command.store_id)

    def _slots(self, command: Any) -> Sequence[int]:
        return list(command.slots)

    def _names(self, space: str, command: Any) -> Sequence[Hashable]:
        return [(space, each) for each in command.hashes]


class TokenStore(Store):
    """Names blocks by token ids, reads and fills device slots, and notices one that it is given too early."""

    _goes_on = True

    def _kind(self, command: Any) -> int:
        if isinstance(command, MatchTask):
            return 0
        if isinstance(command, ReadStorageTask):
            return 1
        return 2 if command.flush_cache_exists is None else 3

    def _begin(self, command: Any) -> None:
        if isinstance(command, MatchTask):
            return
        for memory in self._memories:
            for read, written in memory.rank.using:
                used = read if isinstance(command, ReadStorageTask) else written
                if not used.isdisjoint(self._slots(command)):
                    raise WrongError(f"a pass still runs in slots that {command} is about")

    def _found(self, space: str, task: MatchTask) -> tuple[str, int]:  # type: ignore[override]
        return task.task_id, max(0, len(self._stored(self._path(space, task, 0))) - task.first_block_idx)

    def _answer_load(self, fails: bool, wrong: bool, cut: float, space: str, command: Any) -> list[Any]:
        if len(self._stored(self._path(space, command, 0))) < command.start_read_block_idx:
            wrong, cut = True, 0.0
        return super()._answer_load(fails, wrong, cut, space, command)

    def _answer_store(self, fails: bool, wrong: bool, cut: float, space: str, command: Any) -> list[Any]:
        if not (fails or wrong):
            return super()._answer_store(fails, wrong, cut, space, command)
        slots = self._slots(command)
        self._late.append((self._world.clock() + LATE_S, slots, [self._read(slot) for slot in slots]))
        return [
            WriteDone(command.task_id, rank, 0, error="disk full", quiet_after_s=LATE_S)
            for rank in range(self.num_ranks)
        ]

    def _answer_statement(self, fails: bool, _: bool, __: float, space: str, command: Any) -> list[Any]:
        if not fails:
            about = {path for _, path in self._path(space, command, command.start_write_block_idx)}
            self.index = self.index | about if command.flush_cache_exists else self.index - about
        return [FlushDone(command.task_id, 0, 0, error="no route to host" if fails else None)]

    def _store_done(self, name: str, rank: int, count: int, error: str | None) -> Any:
        return WriteDone(name, rank, count, num_stored=count)

    def _name(self, command: Any) -> str:
        return str(command.task_id)

    def _slots(self, command: Any) -> Sequence[int]:
        return list(command.gpu_block_ids)

    def _names(self, space: str, command: Any) -> Sequence[Hashable]:
        is_read = isinstance(command, ReadStorageTask)
        return self._path(space, command, command.start_read_block_idx if is_read else command.start_write_block_idx)

    def _path(self, space: str, command: Any, first: int) -> list[tuple[str, tuple[int, ...]]]:
        tokens, size = command.token_ids, self._world.host.block_size
        return [(space, tuple(tokens[: size * (at + 1)])) for at in range(first, len(tokens) // size)]


class Index(TokenStore):
    """Nothing is stored; it is told what the cache has, and knows it in the end."""

    @property
    def is_idle(self) -> bool:
        flushes: Any = self.tier._stores
        return super().is_idle and not (flushes.num_waiting or flushes._ended)

    def check_idle(self) -> None:
        size, cached = self._world.host.block_size, set()
        for tokens in self._world.clients.computed:
            hasher = BlockHasher(size)
            hasher.extend(tokens)
            count = self._world.host.engine.manager.count_cached(hasher.hashes)
            cached.update(tuple(tokens[: size * (at + 1)]) for at in range(count))
        more, less = (sorted(each)[:3] for each in (self.index - cached, cached - self.index))
        if more or less:
            raise WrongError(f"the store's index has {more}, which the cache lacks, and lacks {less}")


def _equal(one: Value, other: Value) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
