"""A prefill and a decode server: two engines, with jobs, answers, leases, fetches and news on their way between them.

A slot holds garbage until its fetch has ended, and an offered block is read at the last moment. So an engine that gives
slots away or uses them too early changes tokens. The parts below the engines (desks, links) are modelled by their
contract: a fetch ends once, no byte arrives after it, and its lease ends with it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from fastdeploy_kvcache_v1.contract.messages import BatchRequest
from fastdeploy_kvcache_v1.contract.sessions import SessionHint
from fastdeploy_kvcache_v1.lab.model.step import StepResult
from fastdeploy_kvcache_v1.lab.server.engine.generation import Delta, Failure
from fastdeploy_kvcache_v1.lab.server.prefill_job import PrefillAnswer, PrefillJob
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.offer_desk import LeaseEnd
from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, OpenLease, StartFetch, TransferNews, WithdrawLease
from fastdeploy_kvcache_v1.transfer.settings import PeerPort

from .chance import pick
from .clients import Request
from .embedded_host import EmbeddedHost, Engine
from .memory import GARBAGE, WrongError

HERE = PeerPort("127.0.0.1", 1)
URL = "http://prefill"


class Between:
    """Leases and fetches of the workers of `prefill` and `decode`. Messages of ranks go to their `news`.

    Bytes move between the first ranks when the last rank has all of them. Earlier writes are garbage.
    """

    world: Any
    count: Counter[str]

    def __init__(self, prefill: Any, decode: Any, num_ranks: int) -> None:
        self.prefill, self.decode, self.num_ranks = prefill, decode, num_ranks
        self.leases: dict[str, OpenLease] = {}
        self.complete: set[str] = set()
        """Leases whose blocks are computed."""
        self._broken: set[tuple[str, int]] = set()
        """(lease, rank) of failures. A fetch that begins later fails on that rank."""
        self.fetches: dict[str, StartFetch] = {}
        self._lease_left: dict[str, set[int]] = {}
        self._fetch_left: dict[str, set[int]] = {}
        """Ranks that have not ended it. A name is used once, so an ended fetch also ends a lease that opens later."""
        self._failing: set[str] = set()
        """Fetches that failed on some rank."""

    def handle(self, command: Any) -> None:
        {
            OpenLease: self.open_lease,
            WithdrawLease: lambda each: self.end_lease(each.lease, each.reason),
            StartFetch: self.start_fetch,
            CancelFetch: lambda each: self.end_fetch(each.request_id, each.reason),
        }[type(command)](command)

    def note_pass(self, by: Any, batch: BatchRequest, result: StepResult) -> None:
        """A pass has ended."""
        for task in batch.requests if by is self.prefill else ():
            lease = self.leases.get(task.request_id)
            is_whole = lease is not None and task.start + len(task.token_ids) == lease.num_tokens
            if is_whole and task.request_id not in result.retry:
                self.complete.add(task.request_id)

    def open_lease(self, command: OpenLease) -> None:
        self.leases[command.lease] = command
        self._lease_left[command.lease] = set(range(self.num_ranks))
        for rank in set(range(self.num_ranks)) - self._fetch_left.get(command.lease, set(range(self.num_ranks))):
            self.end_lease(command.lease, "the decode server reads no more", rank)

    def end_lease(self, lease: str, error: str | None = None, rank: int | None = None) -> None:
        """End the lease on one rank, or on all that are left. The decode server learns of a failure."""
        for each in self._take(self._lease_left, lease, rank):
            self._broken |= set() if error is None else {(lease, each)}
            self.prefill.news.append((each, TransferNews(leases=(LeaseEnd(lease, lease, error),))))
            if not self._lease_left[lease]:
                del self.leases[lease]
                self.complete.discard(lease)
            if error is not None:
                self.end_fetch(lease, error, each)

    def start_fetch(self, command: StartFetch) -> None:
        taken = {slot for each in self.fetches.values() for slot in each.slots}
        assert taken.isdisjoint(command.slots), "two fetches fill one slot"
        self.fetches[command.request_id] = command
        self._fetch_left[command.request_id] = set(range(self.num_ranks))
        for name, rank in sorted(self._broken):
            if name == command.request_id:
                self.end_fetch(name, "the prefill server has it no more", rank)

    def end_fetch(self, name: str, error: str | None = None, rank: int | None = None) -> None:
        for each in self._take(self._fetch_left, name, rank):
            if error is not None:
                self._failing.add(name)
            fetch = self.fetches[name]
            if not self._fetch_left[name]:
                del self.fetches[name]
            failed = () if error is None else fetch.slots
            self.decode.news.append((each, TransferNews(fetches=(FetchResult(name, 100, 1.0, failed, error),))))
            self.end_lease(name, error, each)

    # ---- blocks arrive

    def sources(self, fetch: StartFetch) -> Sequence[int] | None:
        """Return the slots at prefill that the fetch reads, or None before they are computed."""
        lease = self.leases.get(fetch.request_id)
        return None if lease is None or lease.lease not in self.complete else lease.slots[fetch.first_block :]

    def may_write(self, fetch: StartFetch) -> bool:
        return fetch.request_id in self.leases

    def scribble(self, rng: random.Random) -> None:
        """A part of a fetch arrives."""
        fetch, at = pick(self.fetches.values(), rng.random()), rng.random()
        if fetch is not None and self.may_write(fetch):
            self._fill(pick(fetch.slots, at), None)

    def arrive(self, rng: random.Random) -> None:
        """The rest of a fetch arrives on a rank, or it breaks there."""
        fetch, breaks = pick(self.fetches.values(), rng.random()), self.world.faults.draw("fetch breaks", rng)
        rank = rng.randrange(self.num_ranks)
        if fetch is None:
            return
        name, sources = fetch.request_id, self.sources(fetch)
        if breaks:
            self.world.faults.injected("fetch breaks")
            self.end_fetch(name, "connection reset", rank)
        elif sources is not None:
            if self._fetch_left[name] == {rank} and name not in self._failing:
                for source, target in zip(sources, fetch.slots, strict=True):
                    self._fill(target, source)
                self.decode.rank.refilled(fetch.slots)
                self.count["fetched"] += len(fetch.slots)
            self.end_fetch(name, None, rank)

    def _fill(self, slot: int, source: int | None) -> None:
        """Write a slot after all copies and passes have ended."""
        for rank in (self.prefill.rank, self.decode.rank):
            rank.device.run_dry()
        for layer, other in zip(self.decode.rank.layers, self.prefill.rank.layers, strict=True):
            layer[slot] = GARBAGE if source is None else other[source]

    def _take(self, left: dict[str, set[int]], name: str, rank: int | None) -> Iterator[int]:
        for each in range(self.num_ranks) if rank is None else [rank]:
            if each in left.get(name, ()):
                left[name].remove(each)
                yield each


class Roles(EmbeddedHost, Between):
    """Both servers. `engine` is the decode server, which asks the prefill server for most prompts."""

    def __init__(self, world: Any, prefill: Engine, decode: Engine, num_ranks: int) -> None:
        """`num_ranks` is the number of ranks of each server, which report one by one."""
        EmbeddedHost.__init__(self, world, decode, prefill)
        Between.__init__(self, prefill, decode, num_ranks)
        self._asked: dict[str, tuple[Request, SessionHint]] = {}
        """Requests of jobs on their way, and the sessions that the jobs name."""
        self._awaited: dict[str, list[Any]] = {}
        """Events of the prefill server, by job that has arrived."""
        self._dropped: set[str] = set()
        self.drop = self._dropped.add
        for engine in (prefill, decode):
            engine.peers, engine.parts = self, (*engine.parts, "tell_news")
            engine.rank.marks_own = False  # the other server reads these blocks

    def name(self, request: Request) -> str:
        return f"{request.request_id}.{request.uid}"

    def add(self, request: Request, prefill_url: str | None = None) -> None:
        super().add(request, URL if len(request.prompt) % 5 else None)

    @property
    def events(self) -> list[Any]:
        return [*super().events, (30, self.between)]

    def between(self, rng: random.Random) -> None:
        """Some messages and bytes arrive."""
        for part in rng.sample([self.deliver, self.answer, self.arrive, self.scribble, self.break_lease], 3):
            part(rng)

    # ---- jobs and answers, which go over HTTP

    def ask(self, url: str, job: PrefillJob) -> None:
        request = self.live[job.request_id]
        if job.session != request.hint:
            raise WrongError(f"{job.request_id} has another session at the prefill server")
        self._asked[job.request_id] = request, job.session

    def deliver(self, rng: random.Random) -> None:
        name = pick(self._asked, rng.random())
        if name is None:
            return
        (request, session), self._awaited[name] = self._asked.pop(name), []
        job = {"max_tokens": 1, "session": session, "offered_to": (HERE,)}
        self.prefill.core.submit(self.prefill.generation(name, request, self._heard, **job))

    def _heard(self, request: Request, event: Delta | Failure) -> None:
        self._awaited[self.name(request)].append(event)

    def answer(self, rng: random.Random) -> None:
        name, breaks = pick(self._awaited, rng.random()), self.world.faults.draw("answer breaks", rng)
        is_lost, events = self.world.faults.draw("answer is lost", rng), self._awaited.get(name)
        if events is None:
            return
        if not events and name not in self._dropped and not breaks:
            return
        if not events:
            self.prefill.core.abort(name)
        del self._awaited[name]
        if name in self._dropped:
            return
        if is_lost and events and isinstance(events[0], Delta):
            self.world.faults.injected("answer is lost")
            return
        if breaks:
            self.world.faults.injected("answer breaks")
        if not events or breaks:
            told: Any = "connection reset"
        else:
            told = events[0].message if isinstance(events[0], Failure) else PrefillAnswer(events[0].token_ids[0], 0)
        self.world.log("answer", name, told)
        self.decode.core.on_prefill_answer(name, told)

    # ---- leases and fetches of the workers

    def break_lease(self, rng: random.Random) -> None:
        lease, rank = pick(self.leases, rng.random()), rng.randrange(self.num_ranks)
        if self.world.faults.draw("lease breaks", rng) and lease is not None:
            self.world.faults.injected("lease breaks")
            self.end_lease(lease, "the decode server is gone", rank)

    # ---- the end

    @property
    def is_idle(self) -> bool:
        return super().is_idle and not (self._asked or self._awaited or self.fetches)

    def check_idle(self) -> None:
        super().check_idle()
        assert not self.leases
