"""A generation request: its parameters, its state, and the events for its client."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ....contract.misses import Miss
from ....scheduler.block_hashing import BlockHasher
from .request_times import RequestReport, RequestTimes

if TYPE_CHECKING:
    from ....telemetry.trace_recorder import Ticket
    from ....transfer.settings import PeerPort
    from ...model.sampler import SamplingParams
    from ...model.vision import PlacedImage
    from ..text import TextStream


@dataclass(frozen=True)
class GenerationRequest:
    """A validated request: it fits the model and the device tier."""

    request_id: str
    prompt_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    stop_token_ids: frozenset[int] = frozenset()
    min_tokens: int = 0
    """Stop tokens and stop strings are ignored before this many output tokens."""
    early_sampling: SamplingParams | None = None
    """Replaces `sampling` for the first `min_tokens` tokens, in which the model must not end."""
    images: tuple[PlacedImage, ...] = ()
    """In the order of their placeholders."""
    cache_salt: str = ""
    offered_to: tuple[PeerPort, ...] = ()
    """On a prefill server: workers of the decode server that reads the prompt's blocks, by rank."""
    cache_report: bool = False
    """The answer says why its prompt missed."""


@dataclass(frozen=True)
class Usage:
    """Token counts of a request. `cached_tokens` of the prompt were cache hits."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    miss: Miss | None = None
    """Why the others were not, if the client asks."""


@dataclass(frozen=True)
class Delta:
    """New output. Text may lag behind tokens: it waits for whole characters and possible stop strings."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    """`stop` or `length` on the last delta."""
    usage: Usage | None = None
    """So far."""


@dataclass(frozen=True)
class Failure:
    """The end of a request without an answer."""

    status: int
    """HTTP status."""
    message: str


Sink = Callable[["Delta | Failure"], None]
"""Receives every event of a request, in order, on the engine thread. Must not block or raise."""


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FETCHING = "fetching"
    """Blocks of another server arrive in its slots, and it is not computed."""
    OFFERED = "offered"
    """It is computed, and another server reads its blocks."""
    LEAVING = "leaving"
    """It has ended, and bytes may still arrive in its slots."""
    FINISHED = "finished"


@dataclass(eq=False)
class Generation:
    """Mutable state of a request. Engine thread only."""

    request: GenerationRequest
    hasher: BlockHasher
    """Block hashes of `tokens`."""
    text: TextStream
    sink: Sink
    arrival: int = -1
    """Position in the order of arrival: earlier requests are served first and preempted last."""
    state: State = State.WAITING
    num_computed: int = 0
    """Leading tokens whose KV is in the request's blocks."""
    has_computed: bool = False
    """It ran before, so hits after a preemption include its own blocks."""
    cached_tokens: int | None = None
    """Prompt tokens that were never computed for this request; None before it was first admitted."""
    miss: Miss | None = None
    """What its first admission missed, if its answer has to say so."""
    tokens_before_wait: int | None = None
    """Cached tokens when it began to wait for a prefix of another request, or None."""
    copy_failures: int = 0
    drafts: tuple[int, ...] = ()
    """Guesses of the tokens behind `tokens`."""
    prefill_url: str | None = None
    """On a decode server: the prefill server to ask. None once it was asked."""
    has_lost_offer: bool = False
    """It was preempted after its blocks were offered."""
    ticket: Ticket | None = None
    """Of the trace that is recorded."""
    submitted_at: float = field(default_factory=time.monotonic)
    times: RequestTimes = field(default_factory=RequestTimes)
    tokens: list[int] = field(init=False)
    """Prompt and output so far. The KV of the last sampled token is not computed yet."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens to compute before the next one can be sampled, at least 1."""
        return len(self.tokens) - self.num_computed

    @property
    def max_computed(self) -> int:
        """Upper limit of tokens whose KV is computed: all but the last one."""
        return len(self.request.prompt_ids) + self.request.max_tokens - 1

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def sampling(self) -> SamplingParams:
        """Of the next token."""
        request = self.request
        is_early = self.num_outputs < request.min_tokens
        return request.early_sampling if is_early and request.early_sampling is not None else request.sampling

    @property
    def usable_drafts(self) -> tuple[int, ...]:
        """Drafts to compute with the next token: sampled by the same rules, and within the output limit."""
        room = self.max_computed - self.num_tokens
        return () if self.num_outputs < self.request.min_tokens else self.drafts[: max(0, room)]

    @property
    def usage(self) -> Usage:
        return Usage(len(self.request.prompt_ids), self.num_outputs, self.cached_tokens or 0, self.miss)

    def report(self, state: str, now: float) -> RequestReport:
        usage, times, total_s = self.usage, self.times, now - self.submitted_at
        counts = usage.prompt_tokens, self.cached_tokens, usage.completion_tokens
        waits = times.queue_s, times.storage_s, times.copies_s
        return RequestReport(self.request_id, state, *counts, *waits, times.prefill_s, times.first_token_s, total_s)

    def append(self, token: int) -> Delta:
        """Add a sampled token. Returns the delta for the client, with a `finish_reason` at the end."""
        self.drafts = ()
        self.tokens.append(token)
        self.hasher.extend([token])
        may_stop = self.num_outputs >= self.request.min_tokens
        if may_stop and token in self.request.stop_token_ids:
            return Delta(self.text.flush(), (token,), "stop", self.usage)
        text = self.text.push(token, may_stop=may_stop)
        if self.text.stopped:
            return Delta(text, (token,), "stop", self.usage)
        if self.num_outputs >= self.request.max_tokens:
            text += self.text.flush()
            return Delta(text, (token,), "stop" if self.text.stopped else "length", self.usage)
        return Delta(text, (token,), usage=self.usage)
