"""Stores behind the real storage tier: slow, failing, full, forgetful or lying, by their faults.

`Store` names blocks by hashes and uses host slots; `TokenStore` names them by token ids and uses device slots. Calls of
one kind end in order, calls of different kinds in any order. A failed call goes on reading or writing for a while.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_kvcache_v1.fastdeploy_integration.worker.storage import RankStorage
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher
from fastdeploy_kvcache_v1.storage.attention_store.tasks import FlushDone, MatchTask, ReadStorageTask, WriteDone
from fastdeploy_kvcache_v1.storage.messages import (
    Failing,
    LoadDone,
    QueryDone,
    RankDone,
    StoreDone,
    TouchDone,
    UseNamespace,
)

from .chance import pick
from .memory import GARBAGE, WrongError

LATE_S = 2.0
"""Seconds that a failed call goes on."""

Value = list[Any]
"""Bytes by rank."""


class Call(NamedTuple):
    """A command, in the form that all stores share."""

    kind: str
    name: str
    path: Sequence[Hashable]
    """Names of blocks, with the namespace."""
    first: int = 0
    """The call is about the blocks from here on."""
    slots: Sequence[int] = ()
    exists: bool | None = None
    """A statement to the index: whether the server has the blocks. None for a transfer."""


class Late(NamedTuple):
    """A call that has failed, and goes on."""

    until: float
    slots: Sequence[int]
    values: list[Value] | None
    """What it reads; None: it writes garbage."""
    answers: Sequence[Any]
    """Given then."""


class RankMemory(RankStorage):
    """The tier of one rank that a store reads and fills."""

    controller: Any = None
    """None for a rank without copies."""
    using: Iterable[tuple[set[int], set[int]]] = ()
    """Slots read and slots written by each pass that has not ended."""

    def __init__(self, *, on_device: bool) -> None:
        self.uses_device_tier = on_device

    def use(self, controller: Any) -> None:
        self.controller = controller

    def let_go(self) -> None:
        """Do nothing: here the store forgets nothing late."""

    def read(self, slot: int) -> Any:
        return np.stack(self._parts(slot))

    def fill(self, slot: int, value: Any = None) -> None:
        """Write `value`, or garbage without one."""
        for number, row in enumerate(self._parts(slot)):
            row[:] = GARBAGE if value is None else value[number]

    def _parts(self, slot: int) -> Sequence[Any]:
        """Return the parts of the slot's bytes."""
        if not self.uses_device_tier:
            return [self.controller.host_pool.slot(slot).view(np.int64)]
        return [role.array[slot].view(np.int64) for rows in self.controller.transfers.device_rows for role in rows]

    def refilled(self, slots: Sequence[int]) -> None:
        """Tell the table of device slots of a write from outside."""
        if self.controller is not None:
            self.controller.transfers.refilled(slots)


class Store:
    """A `StoreLink`, and the store at its other end. `memories` has one entry per rank."""

    is_ready = is_serving = True
    tier: Any = None
    """The engine's tier: idle when no slot is lent to the store."""
    on_device = False
    """True: the store uses device slots, and a failed call may go on."""

    def __init__(self, world: Any, memories: Sequence[RankMemory]) -> None:
        self._world, self._memories, self.num_ranks = world, memories, len(memories)
        self.namespace = ""
        self.values: dict[Hashable, Value] = {}
        kinds = ("query", "load", "store", "state", "touch")
        self.calls: dict[str, deque[Call]] = {kind: deque() for kind in kinds}
        """Open calls by kind."""
        self.index: set[Hashable] = set()
        """Paths of blocks that the server has stated to have."""
        self._late: list[Late] = []
        """Failed calls."""
        self._listener: Callable[[Any], None] = print
        self.events = [(12, self.answer), (5, self.go_on), (0.5, self.lose)]

    # ---- the link

    def listen(self, listener: Callable[[Any], None]) -> None:
        self._listener = listener

    def touch(self, touch_id: str, hashes: Sequence[Hashable]) -> None:
        self._begin(Call("touch", touch_id, self._named(hashes)))

    def close(self) -> None:
        """Do nothing."""

    def query(self, query_id: str, hashes: Sequence[Hashable]) -> None:
        self._begin(Call("query", query_id, self._named(hashes)))

    def use_namespace(self, namespace: Any) -> None:
        self.namespace = namespace.digest

    def load(self, load_id: str, hashes: Sequence[Hashable], slots: Sequence[int]) -> None:
        self._begin(Call("load", load_id, self._named(hashes), slots=slots))

    def store(self, store_id: str, hashes: Sequence[Hashable], slots: Sequence[int]) -> None:
        self._begin(Call("store", store_id, self._named(hashes), slots=slots))

    def _named(self, blocks: Iterable[Hashable]) -> Sequence[Hashable]:
        return [(self.namespace, each) for each in blocks]

    def _begin(self, call: Call) -> None:
        """Open a call, whose slots may be read or filled from now on."""
        if len(set(call.slots)) < len(call.slots):
            raise WrongError(f"a slot is named twice: {call}")
        self.calls[call.kind].append(call)
        for memory in self._memories if self.on_device else ():
            for read, written in memory.using:
                if not (read if call.kind == "load" else written).isdisjoint(call.slots):
                    raise WrongError(f"a pass still runs in slots that {call} is about")

    # ---- the world's end

    @property
    def is_idle(self) -> bool:
        return not any(self.calls.values()) and (self.tier is None or self.tier.is_idle)

    def answer(self, rng: random.Random) -> None:
        """End one call."""
        faults = self._world.faults
        fails, lies, full = (faults.draw(name, rng) for name in ("store fails", "store lies", "store is full"))
        at, cut = rng.random(), rng.random()
        kind = pick((each for each in self.calls if self.calls[each]), at)
        if kind is None:
            return
        if faults.draw("store is busy", rng) and kind == "store":
            faults.injected("store is busy")
            return
        wrong = {"load": lies, "store": full}.get(kind, False)
        for name in ["store fails"] * fails + [f"store {'lies' if kind == 'load' else 'is full'}"] * wrong:
            faults.injected(name)
        call = self.calls[kind].popleft()
        self._world.log(f"store: {kind} {call.name} of {len(call.path) - call.first} blocks ends")
        for each in getattr(self, f"_{kind}")(call, fails, wrong, cut):
            self._listener(each)

    def lose(self, rng: random.Random) -> None:
        name = pick(self.values, rng.random())
        if self._world.faults.draw("store loses", rng) and name is not None:
            self._world.faults.injected("store loses")
            del self.values[name]

    def go_on(self, rng: random.Random) -> None:
        """Failed calls read or write once more, or are answered."""
        now, late = self._world.clock(), self._late
        ended, self._late = ([each for each in late if (each.until <= now) is over] for over in (True, False))
        for answer in itertools.chain.from_iterable(late.answers for late in ended):
            self._listener(answer)
        for _, slots, values, _ in self._late:
            if values is None:
                self._spoil(slots)
            elif not all(_equal(self._read(slot), value) for slot, value in zip(slots, values, strict=True)):
                raise WrongError(f"slots {slots} changed while the store reads them")

    def _read(self, slot: int) -> Value:
        return [memory.read(slot) for memory in self._memories]

    def _spoil(self, slots: Sequence[int]) -> None:
        for memory, slot in itertools.product(self._memories, slots):
            memory.fill(slot)

    def _stored(self, names: Sequence[Hashable]) -> list[Value]:
        """Return the values up to the first missing one."""
        return [self.values[name] for name in itertools.takewhile(self.values.__contains__, names)]

    # ---- answers. `wrong`: the first value of a load lies, or there is no room for a store

    def _query(self, call: Call, fails: bool, wrong: bool, cut: float) -> list[Any]:
        if fails:
            return [QueryDone(call.name, 0, error="no route to host")]
        return [QueryDone(call.name, max(0, len(self._stored(call.path)) - call.first))]

    def _load(self, call: Call, fails: bool, wrong: bool, cut: float) -> list[Any]:
        if len(self._stored(call.path)) < call.first:
            wrong, cut = True, 0.0
        values = self._stored(call.path[call.first :])[: len(call.slots)]
        if fails or wrong:
            values = values[: int(cut * len(values))]
        self._spoil(call.slots)
        for slot, value in zip(call.slots, values, strict=False):
            for memory, part in zip(self._memories, value, strict=True):
                memory.fill(slot, part)
        for memory in self._memories if self.on_device else ():  # of host slots the next step tells
            memory.refilled(call.slots[: len(values)])
        error = "connection reset" if fails else None
        if fails and self.on_device and cut < 0.7:
            answers = self._of_ranks(LoadDone(call.name, 0, wrong, 0, 0.01, error))
            self._late.append(Late(self._world.clock() + LATE_S, call.slots, None, answers))
            return [Failing(call.name, error)] * self.num_ranks
        return self._of_ranks(LoadDone(call.name, len(values), wrong, 0, 0.01, error))

    def _store(self, call: Call, fails: bool, wrong: bool, cut: float) -> list[Any]:
        fails, values = fails or wrong, [self._read(slot) for slot in call.slots]
        if fails and self.on_device:
            answers = self._of_ranks(self._store_done(call, fails))
            self._late.append(Late(self._world.clock() + LATE_S, call.slots, values, answers))
            return []
        names = call.path[call.first : call.first + len(call.slots)]
        for name, slot, value in () if fails else zip(names, call.slots, values, strict=True):
            if not _equal(self.values.setdefault(name, value), value):
                raise WrongError(f"slot {slot} is stored under the name of another block")
        return self._of_ranks(self._store_done(call, fails))

    def _touch(self, call: Call, fails: bool, wrong: bool, cut: float) -> list[Any]:
        return [TouchDone(call.name, len(self._stored(call.path)), "no route to host" if fails else None)]

    def _of_ranks(self, answer: Any) -> list[Any]:
        """The store answers once."""
        return [answer]

    def _store_done(self, call: Call, fails: bool) -> Any:
        return StoreDone(call.name, len(call.slots), error="disk full" if fails else None)


class TokenStore(Store):
    """A store that names blocks by token ids and uses device slots. It notices a slot that it gets too early."""

    on_device = True

    def send(self, command: Any) -> None:
        if isinstance(command, UseNamespace):
            self.use_namespace(command.namespace)
        else:
            self._begin(self._call(command))

    def _call(self, command: Any) -> Call:
        tokens, size = command.token_ids, self._world.host.block_size
        path = self._named(tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size))
        if isinstance(command, MatchTask):
            return Call("query", command.task_id, path, command.first_block_idx)
        if isinstance(command, ReadStorageTask):
            return Call("load", command.task_id, path, command.start_read_block_idx, command.gpu_block_ids)
        exists, first = command.flush_cache_exists, command.start_write_block_idx
        kind = "store" if exists is None else "state"
        return Call(kind, command.task_id, path, first, command.gpu_block_ids, exists)

    def _of_ranks(self, answer: Any) -> list[Any]:
        """Each rank answers."""
        return [RankDone(rank, answer) for rank in range(self.num_ranks)]

    def _store_done(self, call: Call, fails: bool) -> Any:
        if fails:
            return WriteDone(call.name, 0, error="disk full")
        return WriteDone(call.name, len(call.slots), num_stored=max(0, len(self._stored(call.path)) - call.first))

    def _state(self, call: Call, fails: bool, wrong: bool, cut: float) -> list[Any]:
        if fails:
            return [FlushDone(call.name, 0, error="no route to host")]
        about = {path for _, path in call.path[call.first :]}
        self.index = self.index | about if call.exists else self.index - about
        return [FlushDone(call.name, 0)]


class Index(TokenStore):
    """An index without values: in the end it must know exactly the cached blocks."""

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
