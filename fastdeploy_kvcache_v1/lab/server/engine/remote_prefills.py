"""The decode side: requests whose prompt a prefill server computes, from their slots to their first token.

Such a request holds slots for its whole prompt. Its blocks (a fetch of the worker) and its first token (an HTTP answer)
arrive in any order. If one of them fails, the prompt is computed here in the same slots, behind the prefix found here.
Slots change hands only after the fetch has ended on the worker, because no byte can arrive then.
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
"""Times `wait_s`: limit of a fetch that makes progress. The worker ends one without progress earlier."""


OnResumed = Callable[[Generation, int, bool], None]
"""Called when no byte can arrive in a request's slots. The number counts leading tokens whose KV is there. True: its
matched blocks were lost, and the slots are useless.
"""


@source("decode role")
@dataclass
class PrefillCounters:
    """Totals since the start. Written by the engine thread; any thread may read single fields."""

    prompts_recomputed: int = counter("Requests whose prompt the decode server computed after all")
    recomputed_prompt_tokens: int = counter("Tokens of these prompts that were not found here")
    prompts_declined: int = counter(
        "Requests whose prompt the decode server computed from the start: too little was missing"
    )


@dataclass(eq=False)
class _Prefill:
    generation: Generation
    num_matched: int
    """Leading tokens that hit here."""
    answer: PrefillAnswer | None = None
    error: str | None = None
    """Why no answer will come."""
    end: FetchEnd | None = None
    answer_deadline: float = float("inf")
    is_lost: bool = False


class RemotePrefills:
    """Engine thread only."""

    on_resumed: OnResumed
    """Called once per request, when it goes on or has left."""

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
        """`addresses` of this server's workers, by rank, all on one host. Prompts without a full block to fetch are
        declined.
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
        """Requests that hold slots for blocks from outside. Thread-safe."""
        return len(self._open)

    def wants(self, generation: Generation, num_matched: int) -> bool:
        """True: admit the request for a prefill server, with `num_matched` tokens found here."""
        if generation.prefill_url is None:
            return False
        is_worth_it = generation.num_tokens - num_matched > self._block_size and not generation.request.images
        if not is_worth_it:
            generation.prefill_url = None
            self.counters.prompts_declined += 1
        return is_worth_it

    def begin(self, generation: Generation, block_table: list[DeviceSlot]) -> None:
        """Fetch for an admitted request: `block_table` covers its prompt, of which `num_computed` tokens are valid."""
        url, name = generation.prefill_url, generation.request_id
        assert url is not None, f"request {name} has no prefill server"
        generation.prefill_url = None  # one server is asked, once
        first = generation.num_computed // self._block_size
        self.ledger.grant(name, LAST_RESORT * self._settings.wait_s)
        self.ledger.start(name)
        self._open[name] = _Prefill(generation, generation.num_computed)
        self._commands.append(StartFetch(name, tuple(block_table[first:]), first))
        self._asker.ask(url, self._job(generation))

    def answered(self, request_id: str, answer: PrefillAnswer | str) -> PrefillAnswer | None:
        """Take the prefill server's answer or error. Returns the first token if it is wanted."""
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
        self._ended(self.ledger.report(result, rank))

    def leave(self, request_id: str) -> None:
        """Note the end for the client. Its slots are returned once no byte can arrive in them."""
        self._give_up(request_id, "the request has ended")

    def lose(self, request_id: str) -> None:
        """Note that its matched blocks are lost. It resumes as after a preemption."""
        if request_id in self._open:
            self._open[request_id].is_lost = True
        self._give_up(request_id, "the prefix it stands on was lost")

    def tick(self) -> None:
        for end in self.ledger.give_up_overdue():
            self._ended(end)
        now = self._clock()
        for name, each in list(self._open.items()):
            if each.answer_deadline <= now and each.error is None:
                each.error = "the blocks are here, and the first token is not"
                self._asker.drop(name)
                self._settle(name)

    def seconds_to_deadline(self) -> float | None:
        """When to `tick`; None: never."""
        waits = [each.answer_deadline for each in self._open.values() if each.answer_deadline != float("inf")]
        until_answer = max(0.0, min(waits) - self._clock()) if waits else None
        known = [each for each in (self.ledger.seconds_to_deadline(), until_answer) if each is not None]
        return min(known) if known else None

    def take_commands(self) -> list[TransferCommand]:
        """Commands for the next batch."""
        cancels = [CancelFetch(name, reason) for name, reason in self.ledger.take_cancels().items()]
        commands, self._commands = [*self._commands, *cancels], []
        return commands

    def check_idle(self) -> None:
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
            session=hasher.session,
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
        """Let the request go on once its blocks and token are there, or cannot come."""
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
            # Without a first token, the last prompt token is recomputed for its logits.
            num_computed = num_prompt if known.answer is not None else num_prompt - 1
        elif generation.state is State.FETCHING:
            self.counters.prompts_recomputed += 1
            self.counters.recomputed_prompt_tokens += num_prompt - num_computed
        self.on_resumed(generation, num_computed, known.is_lost)
