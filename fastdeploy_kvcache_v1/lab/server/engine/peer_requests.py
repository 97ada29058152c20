"""Requests that two servers share, as the engine core sees them: who holds their slots, and who computes next."""

from __future__ import annotations

from collections.abc import Sequence

from ....scheduler.cache_manager import CacheManager
from ....transfer.offer_desk import LeaseEnd
from ....transfer.rank_messages import TransferCommand, TransferNews
from ..prefill_job import PrefillAnswer
from .generation import Generation, State
from .offered_prefills import OfferedPrefills
from .remote_prefills import RemotePrefills
from .scheduler import Scheduled, Scheduler

__all__ = ["PeerRequests"]


class PeerRequests:
    """Engine thread only. `remote` of a decode server, `offered` of a prefill server; a mixed one has neither."""

    def __init__(
        self,
        manager: CacheManager,
        scheduler: Scheduler,
        *,
        remote: RemotePrefills | None = None,
        offered: OfferedPrefills | None = None,
    ) -> None:
        self._manager = manager
        self._scheduler = scheduler
        self.remote = remote
        self.offered = offered
        if remote is not None:
            remote.on_resumed = self._resume
        self._computed: dict[str, Generation] = {}
        """Answered, with a lease that is open."""

    @property
    def sides(self) -> list[tuple[str, OfferedPrefills | RemotePrefills]]:
        """This server's, each with its name."""
        both: tuple[tuple[str, OfferedPrefills | RemotePrefills | None], ...]
        both = (("prefill", self.offered), ("decode", self.remote))
        return [(name, side) for name, side in both if side is not None]

    @property
    def is_idle(self) -> bool:
        """Nothing is open with another server."""
        return not any(len(side) for _, side in self.sides)

    def knows(self, request_id: str) -> bool:
        """Whether something is still open under this name."""
        return self.offered is not None and request_id in self.offered

    def admitted(self, plan: Sequence[Scheduled]) -> None:
        """After every `Scheduler.schedule`."""
        for generation in self._scheduler.newly_fetching:
            assert self.remote is not None, "no server computes prompts for this one"
            self.remote.begin(generation, self._manager.block_table(generation.request_id))
        for item in plan:
            generation = item.generation
            if generation.request.offered_to and not self.knows(generation.request_id):
                assert self.offered is not None, "this server offers no blocks"
                self.offered.open(generation, item.block_table)

    def take_commands(self) -> list[TransferCommand]:
        """For the worker, with the next batch."""
        return [command for _, side in self.sides for command in side.take_commands()]

    def tick(self) -> None:
        """Act on deadlines."""
        if self.remote is not None:
            self.remote.tick()

    def seconds_to_deadline(self) -> float | None:
        return None if self.remote is None else self.remote.seconds_to_deadline()

    def lost_offers(self) -> list[Generation]:
        """Waiting requests whose blocks were taken away after they were offered: nobody can use them any more."""
        lost, self._scheduler.lost_offers = self._scheduler.lost_offers, []
        return [each for each in lost if each.state is State.WAITING]

    def keep(self, generation: Generation) -> bool:
        """The request is computed. True: its blocks stay where they are until the lease has ended."""
        if not self.knows(generation.request_id):
            return False
        self._scheduler.set_aside(generation)
        self._computed[generation.request_id] = generation
        return True

    def leave(self, generation: Generation) -> bool:
        """The request has ended for its client. True: its slots are given back later, not now."""
        if generation.state is State.FETCHING:
            assert self.remote is not None, "a request that fetches has another server"
            generation.state = State.LEAVING
            self.remote.leave(generation.request_id)
            return True
        if self.offered is not None:
            self.offered.withdraw(generation.request_id, "the request has ended")
        return False

    def lose(self, generation: Generation) -> None:
        """A fetching request has lost what it matched: it starts again when nothing arrives in its slots any more."""
        assert self.remote is not None, "a request that fetches has another server"
        self.remote.lose(generation.request_id)

    def answered(self, request_id: str, answer: PrefillAnswer | str) -> PrefillAnswer | None:
        """A prefill server's answer. Returns one whose token is wanted."""
        return None if self.remote is None else self.remote.answered(request_id, answer)

    def reported(self, news: TransferNews, rank: int = 0) -> list[LeaseEnd]:
        """News of a worker rank. Returns the leases that are over before their request was computed."""
        early = []
        for end in news.leases:
            assert self.offered is not None, "this server offers no blocks"
            if self.offered.reported(end, rank):
                generation = self._computed.pop(end.request_id, None)
                if generation is not None:
                    self._scheduler.finish(generation)
                else:
                    early.append(end)
        for result in news.fetches:
            assert self.remote is not None, "this server fetches nothing"
            self.remote.reported(result, rank)
        return early

    def _resume(self, generation: Generation, num_computed: int, is_lost: bool) -> None:
        """Let a request run, or leave, in whose slots nothing arrives any more."""
        if generation.state is State.LEAVING:
            self._scheduler.finish(generation)
            return
        num_matched = generation.num_computed
        self._scheduler.resume(generation, num_computed)
        if is_lost:
            self._scheduler.preempt(generation)
        elif num_computed > num_matched:
            generation.has_computed = True
            self._manager.commit(generation.request_id, num_computed)
        else:
            generation.cached_tokens = num_computed

    def check_idle(self) -> None:
        """Raises `InvariantError` unless nothing is open with another server."""
        for _, side in self.sides:
            side.check_idle()
