"""Requests that two servers share: which side holds their slots, and which computes next."""

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
    """Engine thread only. A decode server has `remote`, a prefill server `offered`, a mixed one neither."""

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
        """Answered requests with an open lease."""

    @property
    def sides(self) -> list[tuple[str, OfferedPrefills | RemotePrefills]]:
        """The sides of this server, by name."""
        both: tuple[tuple[str, OfferedPrefills | RemotePrefills | None], ...]
        both = (("prefill", self.offered), ("decode", self.remote))
        return [(name, side) for name, side in both if side is not None]

    @property
    def is_idle(self) -> bool:
        return not any(len(side) for _, side in self.sides)

    def knows(self, request_id: str) -> bool:
        """True while the request is open with another server."""
        return self.offered is not None and request_id in self.offered

    def admitted(self, plan: Sequence[Scheduled]) -> None:
        """Call after each `Scheduler.schedule`."""
        for generation in self._scheduler.newly_fetching:
            assert self.remote is not None, "no server computes prompts for this one"
            self.remote.begin(generation, self._manager.block_table(generation.request_id))
        for item in plan:
            generation = item.generation
            if generation.request.offered_to and not self.knows(generation.request_id):
                assert self.offered is not None, "this server offers no blocks"
                self.offered.open(generation, item.block_table)

    def take_commands(self) -> list[TransferCommand]:
        """Commands for the next batch."""
        return [command for _, side in self.sides for command in side.take_commands()]

    def tick(self) -> None:
        if self.remote is not None:
            self.remote.tick()

    def seconds_to_deadline(self) -> float | None:
        return None if self.remote is None else self.remote.seconds_to_deadline()

    def lost_offers(self) -> list[Generation]:
        """Waiting requests that were preempted after their blocks were offered, which no server can use now."""
        lost, self._scheduler.lost_offers = self._scheduler.lost_offers, []
        return [each for each in lost if each.state is State.WAITING]

    def keep(self, generation: Generation) -> bool:
        """Note that the request is computed. True: its blocks stay until the lease ends."""
        if not self.knows(generation.request_id):
            return False
        self._scheduler.set_aside(generation)
        self._computed[generation.request_id] = generation
        return True

    def leave(self, generation: Generation) -> bool:
        """Note the end for the client. True: its slots are returned later."""
        if generation.state is State.FETCHING:
            assert self.remote is not None, "a request that fetches has another server"
            generation.state = State.LEAVING
            self.remote.leave(generation.request_id)
            return True
        if self.offered is not None:
            self.offered.withdraw(generation.request_id, "the request has ended")
        return False

    def lose(self, generation: Generation) -> None:
        """Restart a fetching request that lost its matched blocks, once no byte can arrive in its slots."""
        assert self.remote is not None, "a request that fetches has another server"
        self.remote.lose(generation.request_id)

    def answered(self, request_id: str, answer: PrefillAnswer | str) -> PrefillAnswer | None:
        """Take a prefill server's answer. Returns the request if its token is wanted."""
        return None if self.remote is None else self.remote.answered(request_id, answer)

    def reported(self, news: TransferNews, rank: int = 0) -> list[LeaseEnd]:
        """Take a rank's news. Returns leases that ended before their request was computed."""
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
        """Run the request, or end it, once no byte can arrive in its slots."""
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
        for _, side in self.sides:
            side.check_idle()
