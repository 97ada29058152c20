"""Grants: a decode server's requests between their blocks and their first batch.

    granted    it has a seat and blocks; its ranks are told when no batch that is being put together could take them
    fetching   ranks read its blocks
    arrived    every rank has them: with the first token it can run
    lost       a rank failed, a deadline passed, the client left: FastDeploy answers, and takes the blocks back

Blocks that FastDeploy takes back while a rank may still write to them are parked until the rank says that it is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import InvariantError
from ...telemetry.metrics import counter, gauge_of, source
from ...transfer.fetch import FetchResult
from ...transfer.ledger import FetchEnd, FetchLedger, FetchOutcome
from ...transfer.rank_messages import CancelFetch, StartFetch, TransferCommand
from .transfer_name import name_of

ABORTED = 499
FAILED = 502
"""The codes that FastDeploy itself answers with."""

OK = 200

TRY_AGAIN = "PD Error: "
"""The router of 2.6 tries a request whose error says so again, up to three times: one that may go better."""

TRY_AGAIN_S = 30.0
"""And one that failed after so long is not to wait as long three times more."""

NOT_THERE = "this server's worker does not listen"

MOST_NAMES = 4096
"""Of the last grants: what is said of an older one is long past."""


class Lost(NamedTuple):
    """A request that cannot run."""

    request_id: str
    code: int
    reason: str


def told_by_prefill(output: Any) -> Lost:
    """What came instead of a first token. 2.5 says only that there is none."""
    reason = output.error_msg or f"prefill could not send the blocks of {output.request_id}"
    return Lost(output.request_id, int(output.error_code), str(reason))


@dataclass(eq=False)
class Grant:
    """`request` and `first_token` are FastDeploy's."""

    request: Any
    name: str
    slots: tuple[int, ...]
    """Those that are fetched, in the prompt's order."""
    first_block: int = 0
    """The prompt's block that goes to the first of them: those before are here already."""
    after_step: int = -1
    """Its ranks were told to begin when the worker has begun this step."""
    failure: str | None = None
    """Why it cannot run, whatever arrives."""
    since: float = 0.0
    """When it got them."""
    fetch_end: FetchEnd | None = None
    first_token: Any = None
    token_deadline: float = float("inf")


@source("decode role")
class Grants:
    """Not thread-safe: the adapter's lock covers it. Any thread may read the numbers."""

    num_stray_tokens: int = counter("First tokens without a waiting request", "stray_first_tokens")

    def __init__(
        self,
        *,
        num_ranks: int,
        send: Callable[[TransferCommand], Iterable[int]],
        give_back: Callable[[Sequence[int], str], None],
        fetch_s: float,
        token_s: float,
        open_step: Callable[[], int] = lambda: -1,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`send` tells every rank, and returns those that are not there. `give_back(slots, request_id)` takes what was
        parked. `fetch_s`, `token_s`: how long a fetch, and then the first token, may take. `open_step`: the step whose
        copies no batch has yet, -1 where there are none: they may read slots that are free.
        """
        self.ledger = FetchLedger(num_ranks=num_ranks, clock=clock)
        self.num_stray_tokens = 0
        self._send = send
        self._give_back = give_back
        self._fetch_s, self._token_s = fetch_s, token_s
        self._open_step = open_step
        self._clock = clock
        self._grants: dict[str, Grant] = {}
        """By request id."""
        self._fetching: dict[str, tuple[int, ...]] = {}
        """Slots by name, while a rank may write to them."""
        self._parked: dict[str, tuple[Sequence[int], str]] = {}
        """What FastDeploy gave back, and for which request, by name."""
        self._names: dict[str, None] = {}
        """Of the last grants, the oldest first."""
        self._is_scheduling = False
        self._freed_by = -1
        """The last step with copies, or whose batch ended sequences that the worker may still compute."""

    def __len__(self) -> int:
        """Requests that wait for their blocks or their first token."""
        return len(self._grants)

    @property
    @gauge_of("Requests with blocks that wait for their content or their first token", "granted_requests")
    def num_waiting(self) -> int:
        """The same."""
        return len(self)

    @property
    @gauge_of("Blocks of requests that ended, to which a worker may still write", "parked_blocks")
    def num_parked(self) -> int:
        """Blocks."""
        return sum(len(slots) for slots, _ in list(self._parked.values()))

    def of(self, request: Any) -> Grant | None:
        """That of a request which is sent again: the same name."""
        grant = self._grants.get(request.request_id)
        return grant if grant is not None and grant.name == name_of(request) else None

    def is_ending(self, name: str) -> bool:
        """Whether blocks of an earlier grant with this name are still parked."""
        return name in self._parked

    def waiting(self) -> list[Grant]:
        """Requests that wait for their blocks or their first token."""
        return list(self._grants.values())

    def knew(self, name: str | None) -> bool:
        """Whether a request has had blocks here under that name."""
        return name in self._names

    def grant(self, request: Any, name: str, slots: Sequence[int], first_block: int = 0) -> None:
        """FastDeploy has given it a seat and blocks: `slots` are those of the prompt from `first_block` on."""
        self._names[name] = None
        if len(self._names) > MOST_NAMES:
            del self._names[next(iter(self._names))]
        self._grants[request.request_id] = Grant(request, name, tuple(slots), first_block, since=self._clock())
        self.ledger.grant(name, self._fetch_s)
        if not self._is_scheduling:
            self._start(self._grants[request.request_id])

    def schedule_begins(self) -> None:
        """Blocks that FastDeploy frees from now on may still be written until the worker has the batch."""
        self._is_scheduling = True

    def scheduled(self, step: int | None, *, has_freed: bool) -> None:
        """The batch is there, with number `step`; None if it is empty. `has_freed`: it ends running sequences, or
        brings copies.
        """
        self._is_scheduling = False
        if step is not None and has_freed:
            self._freed_by = step
        for grant in self._grants.values():
            if grant.name not in self._fetching and grant.fetch_end is None:
                self._start(grant)

    def recycle(self, slots: Sequence[int], request_id: str) -> bool:
        """FastDeploy gives blocks back, perhaps of an earlier request of that id. Whether they are parked."""
        grant = self._grants.get(request_id)
        if grant is None or grant.slots[0] not in slots:
            return False
        del self._grants[request_id]
        self._take_end(self.ledger.cancel(grant.name, "the request has ended"))
        self._send_cancels()
        if grant.name not in self._fetching:
            return False
        self._parked[grant.name] = slots, request_id
        return True

    def fail(self, request_id: str, reason: str) -> None:
        """Blocks that the request had here are of no use. Nothing happens to one that does not wait."""
        if (grant := self._grants.get(request_id)) is not None:
            grant.failure = reason

    def reported(self, rank: int, result: FetchResult) -> None:
        """A rank's part of a fetch has ended."""
        self._take_end(self.ledger.report(result, rank))
        self._send_cancels()

    def take_token(self, output: Any) -> bool:
        """A request's first token has come, or the reason why there is none. False for one that nobody waits for."""
        grant = self._grants.get(output.request_id)
        if grant is None or grant.name != name_of(output) or grant.first_token is not None:
            self.num_stray_tokens += 1
            return False
        grant.first_token = output
        return True

    def lost(self, aborted: Collection[str]) -> list[Lost]:
        """Requests that cannot run: each until its blocks are given back. `aborted`: ids that are not wanted."""
        for end in self.ledger.give_up_overdue():
            self._take_end(end)
        self._send_cancels()
        now = self._clock()
        found = [self._why_lost(grant, aborted, now) for grant in self._grants.values()]
        return [each for each in found if each is not None]

    def take_ready(self, is_known: Callable[[str], bool]) -> list[Grant]:
        """Requests that have their blocks and their first token, and which FastDeploy's front end knows. They are
        running requests from now on.
        """
        ready = [each for each in self._grants.values() if self._is_ready(each) and is_known(each.request.request_id)]
        for grant in ready:
            del self._grants[grant.request.request_id]
        return ready

    def fetching_slots(self) -> frozenset[int]:
        """Slots to which a rank may write."""
        return frozenset(slot for slots in self._fetching.values() for slot in slots)

    def check(self) -> None:
        """Raises `InvariantError`."""
        self.ledger.check()
        # A slot is written for one request at a time.
        slots = [slot for each in self._fetching.values() for slot in each]
        if len(slots) != len(set(slots)):
            raise InvariantError("grants: a block is fetched for two requests")
        # What is parked waits for a rank.
        if lost := self._parked.keys() - self._fetching.keys():
            raise InvariantError(f"grants: blocks are parked for nothing: {sorted(lost)}")
        # A fetch belongs to a request that waits, or its blocks are parked.
        known = {grant.name for grant in self._grants.values()} | self._parked.keys()
        if stray := self._fetching.keys() - known:
            raise InvariantError(f"grants: blocks of no request are fetched: {sorted(stray)}")

    def check_idle(self) -> None:
        """Raises `InvariantError` unless no request waits and nothing is parked."""
        self.check()
        self.ledger.check_idle()
        if self._grants or self._parked:
            raise InvariantError(f"grants: {sorted(self._grants)} wait, {sorted(self._parked)} are parked")

    def _start(self, grant: Grant) -> None:
        self.ledger.start(grant.name)
        self._fetching[grant.name] = grant.slots
        grant.after_step = max(self._freed_by, self._open_step())
        for rank in self._send(StartFetch(grant.name, grant.slots, grant.first_block, grant.after_step)):
            self.reported(rank, FetchResult(grant.name, 0, 0.0, grant.slots, NOT_THERE))

    def _send_cancels(self) -> None:
        for name, reason in self.ledger.take_cancels().items():
            self._send(CancelFetch(name, reason))

    def _take_end(self, end: FetchEnd | None) -> None:
        if end is None:
            return
        self._fetching.pop(end.request_id, None)
        if end.request_id in self._parked:
            self._give_back(*self._parked.pop(end.request_id))
        for grant in self._grants.values():
            if grant.name == end.request_id:
                grant.fetch_end = end
                grant.token_deadline = self._clock() + self._token_s

    def _why_lost(self, grant: Grant, aborted: Collection[str], now: float) -> Lost | None:
        request_id, token, end = grant.request.request_id, grant.first_token, grant.fetch_end
        if request_id in aborted:
            return Lost(request_id, ABORTED, "Aborted")
        if token is not None and token.error_code != OK:
            return told_by_prefill(token)
        again = TRY_AGAIN if now - grant.since < TRY_AGAIN_S else ""
        if grant.failure is not None:
            return Lost(request_id, FAILED, f"{again}{request_id} cannot run: {grant.failure}")
        if end is not None and end.outcome is not FetchOutcome.ARRIVED:
            return Lost(request_id, FAILED, f"{again}the blocks of {request_id} did not arrive: {end.reason}")
        if now >= grant.token_deadline:
            return Lost(request_id, FAILED, f"{again}the first token of {request_id} did not arrive in time")
        return None

    def _is_ready(self, grant: Grant) -> bool:
        end, token = grant.fetch_end, grant.first_token
        has_blocks = end is not None and end.outcome is FetchOutcome.ARRIVED and grant.failure is None
        return has_blocks and token is not None and token.error_code == OK
