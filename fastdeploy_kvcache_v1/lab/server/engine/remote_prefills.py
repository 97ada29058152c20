"""The decode side: requests whose prompt a prefill server computes, from their slots to their first token.

Such a request is admitted with slots for its whole prompt, and holds them while nothing of it is computed here. Two
things come from outside, in any order: its blocks (a fetch of the worker) and its first token (an answer over HTTP).
When it cannot get both, it is computed here in the same slots, behind the prefix that was found here. Its slots change
hands only when the fetch is over on the worker: then no byte can arrive any more.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ....contract.messages import DeviceSlot
from ....errors import CacheStateError
from ....telemetry.metrics import counter, source
from ....transfer.fetch import FetchResult
from ....transfer.ledger import FetchEnd, FetchLedger, FetchOutcome
from ....transfer.rank_messages import CancelFetch, StartFetch, TransferCommand
from ....transfer.settings import PeerPort, TransferSettings
from ..prefill_job import PrefillAnswer, PrefillJob
from .generation import Generation, State

if TYPE_CHECKING:
    from ..disaggregation.prefill_client import PrefillClient

__all__ = ["PrefillCounters", "RemotePrefills"]

LAST_RESORT = 5
"""Times `wait_s`: a fetch that brings news all the time may take so long. The worker gives up earlier one without news.
"""


OnResumed = Callable[[Generation, int, bool], None]
"""Nothing arrives in the slots of this request any more. The KV of so many leading tokens is in them; or what it
matched here is lost, and they are of no use.
"""


@source("decode role")
@dataclass
class PrefillCounters:
    """Since the start. The engine thread writes; any thread may read single fields."""

    prompts_recomputed: int = counter("Requests whose prompt the decode server computed after all")
    recomputed_prompt_tokens: int = counter("Tokens of these prompts that were not found here")
    prompts_declined: int = counter(
        "Requests whose prompt the decode server computed from the start: too little was missing"
    )


@dataclass(eq=False)
class _Prefill:
    generation: Generation
    num_matched: int
    """Leading tokens that were found here."""
    answer: PrefillAnswer | None = None
    error: str | None = None
    """Why there will be no answer."""
    end: FetchEnd | None = None
    answer_deadline: float = float("inf")
    is_lost: bool = False


class RemotePrefills:
    """Engine thread only."""

    on_resumed: OnResumed
    """Told of each request once, when it goes on or has left."""

    def __init__(
        self,
        asker: PrefillClient,
        addresses: Sequence[PeerPort],
        settings: TransferSettings,
        *,
        block_size: int,
        vocab_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`addresses`: where this server's workers listen, by rank, all on one host. Prompts with less than a block to
        fetch are declined.
        """
        self._asker = asker
        self._addresses = addresses
        self._settings = settings
        self._block_size = block_size
        self._vocab_size = vocab_size
        self._clock = clock
        self._open: dict[str, _Prefill] = {}
        self._commands: list[TransferCommand] = []
        self.ledger = FetchLedger(num_ranks=len(addresses), clock=clock)
        self.counters = PrefillCounters()

    def __len__(self) -> int:
        """Requests that hold slots for blocks from outside. Any thread may read it."""
        return len(self._open)

    def wants(self, generation: Generation, num_matched: int) -> bool:
        """Whether the request is to be admitted for a prefill server, with this many tokens found here."""
        if generation.prefill_url is None:
            return False
        is_worth_it = generation.num_tokens - num_matched > self._block_size and not generation.request.images
        if not is_worth_it:
            generation.prefill_url = None
            self.counters.prompts_declined += 1
        return is_worth_it

    def begin(self, generation: Generation, block_table: list[DeviceSlot]) -> None:
        """It is admitted: `block_table` holds the whole prompt, the first `num_computed` tokens of it valid."""
        url, name = generation.prefill_url, generation.request_id
        assert url is not None, f"request {name} has no prefill server"
        generation.prefill_url = None  # it is asked once
        first = generation.num_computed // self._block_size
        self.ledger.grant(name, LAST_RESORT * self._settings.wait_s)
        self.ledger.start(name)
        self._open[name] = _Prefill(generation, generation.num_computed)
        self._commands.append(StartFetch(name, tuple(block_table[first:]), first))
        self._asker.ask(url, self._job(generation))

    def answered(self, request_id: str, answer: PrefillAnswer | str) -> PrefillAnswer | None:
        """The prefill server's answer, or why there is none. Returns a first token that is wanted."""
        known = self._open.get(request_id)
        if known is None or known.answer is not None or known.error is not None:
            return None  # it came too late
        if isinstance(answer, PrefillAnswer) and not 0 <= answer.token < self._vocab_size:
            answer = f"the prefill server sampled token {answer.token}, which is not in the vocabulary"
        if isinstance(answer, PrefillAnswer):
            known.answer = answer
        else:
            known.error = answer
            self.ledger.cancel(request_id, f"the prompt was not computed: {answer}", FetchOutcome.FAILED)
        self._settle(request_id)
        return known.answer

    def reported(self, result: FetchResult, rank: int = 0) -> None:
        """A worker rank's report of a fetch."""
        self._ended(self.ledger.report(result, rank))

    def leave(self, request_id: str) -> None:
        """The request has ended for its client. Its slots follow when no byte can arrive in them any more."""
        self._give_up(request_id, "the request has ended")

    def lose(self, request_id: str) -> None:
        """What it matched is lost. It resumes as one that was preempted."""
        if request_id in self._open:
            self._open[request_id].is_lost = True
        self._give_up(request_id, "the prefix it stands on was lost")

    def tick(self) -> None:
        """Act on deadlines."""
        for end in self.ledger.give_up_overdue():
            self._ended(end)
        now = self._clock()
        for name, each in list(self._open.items()):
            if each.answer_deadline <= now and each.error is None:
                each.error = "the blocks are here, and the first token is not"
                self._asker.drop(name)
                self._settle(name)

    def seconds_to_deadline(self) -> float | None:
        """When to `tick`; None for never."""
        waits = [each.answer_deadline for each in self._open.values() if each.answer_deadline != float("inf")]
        until_answer = max(0.0, min(waits) - self._clock()) if waits else None
        known = [each for each in (self.ledger.seconds_to_deadline(), until_answer) if each is not None]
        return min(known) if known else None

    def take_commands(self) -> list[TransferCommand]:
        """For the next batch."""
        cancels = [CancelFetch(name, reason) for name, reason in self.ledger.take_cancels().items()]
        commands, self._commands = [*self._commands, *cancels], []
        return commands

    def check_idle(self) -> None:
        """Raises `InvariantError` unless every fetch is over."""
        self.ledger.check_idle()
        if self._open:
            raise CacheStateError(f"requests never resumed: {', '.join(list(self._open)[:8])}")

    def _job(self, generation: Generation) -> PrefillJob:
        hasher, request = generation.hasher, generation.request
        return PrefillJob(
            request_id=request.request_id,
            prompt_ids=list(request.prompt_ids),
            sampling=generation.sampling,
            decode_host=self._addresses[0].host,
            decode_ports=[address.port for address in self._addresses],
            cache_salt=request.cache_salt,
            reads_cache=hasher.access.reads,
            writes_cache=hasher.access.writes,
        )

    def _give_up(self, request_id: str, reason: str) -> None:
        known = self._open.get(request_id)
        if known is None:
            return  # it goes on already
        if known.answer is None and known.error is None:
            known.error = reason
            self._asker.drop(request_id)
        self._ended(self.ledger.cancel(request_id, reason))
        self._settle(request_id)

    def _ended(self, end: FetchEnd | None) -> None:
        if end is None:
            return
        known = self._open[end.request_id]
        known.end = end
        if end.outcome is not FetchOutcome.ARRIVED and known.answer is None and known.error is None:
            known.error = end.reason
            self._asker.drop(end.request_id)
        self._settle(end.request_id)

    def _settle(self, request_id: str) -> None:
        """Let the request go on once nothing more can come, or nothing more is needed."""
        known = self._open.get(request_id)
        if known is None or known.end is None:
            return
        if known.answer is None and known.error is None:
            known.answer_deadline = self._clock() + self._settings.silence_s
            return
        del self._open[request_id]
        generation = known.generation
        num_prompt = len(generation.request.prompt_ids)
        num_computed = known.num_matched
        if known.end.outcome is FetchOutcome.ARRIVED:
            # Without the first token the last one of the prompt is computed again: its logits are wanted.
            num_computed = num_prompt if known.answer is not None else num_prompt - 1
        elif generation.state is State.FETCHING:
            self.counters.prompts_recomputed += 1
            self.counters.recomputed_prompt_tokens += num_prompt - num_computed
        self.on_resumed(generation, num_computed, known.is_lost)
