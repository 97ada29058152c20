"""Plays a trace against a CacheManager like an engine: several admissions per step, a window of open requests.

The manager's time is the trace's: the timestamp of the last admitted request.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from time import perf_counter

from ...config import KVCacheConfig
from ...contract.messages import NoSpace
from ...contract.sessions import LAST_TURN, session_hint
from ...errors import ConfigError, InvariantError
from ...scheduler.block_hashing import GivenHashes
from ...scheduler.cache_manager import CacheManager
from .hashes import TraceHasher
from .shadow import ShadowDataPlane, ShadowRequest
from .trace import TraceRequest

STEPS_BETWEEN_CHECKS = 1000

MAX_BLOCKS = 1 << 26
"""Limit of a tier, whose free list takes 3 GB then."""


TOLD = {
    "trace": "what its lines name and tell",
    "unnamed": "nothing",
    "none": "which session a request belongs to, never when it returns",
    "last": "also which turn is the last one",
    "all": "also when each session returns",
    "lies": "the contrary of the truth: ended sessions return at once, all others have ended",
}
"""Names of what clients tell."""


@dataclass(frozen=True)
class ReplayOptions:
    """Options of a replay. Raises `ConfigError` for a wrong value."""

    config: KVCacheConfig
    window: int = 32
    """Open requests. The oldest ends when the next one needs its place."""
    admissions_per_step: int = 8
    """Requests matched and allocated between two `take_swap_step` calls."""
    outputs: bool = False
    """Also generate and cache the output tokens."""
    verify: bool = False
    """Check each block's content against a shadow data plane, and `check()` each 1,000 steps."""
    waiting: int = 0
    """Waiting requests that the manager knows; in a closed loop the first ones of the queue."""
    closed_loop: bool = False
    """See `closed_loop.py`."""
    step_ms: float = 30.0
    """Simulated milliseconds of a step in a closed loop."""

    told: str = "trace"
    """See `told.py`: a name of `TOLD`."""
    told_error: float = 1.0
    """Times of return are multiplied or divided by it, at random."""
    max_input_tokens: int | None = None
    """Longer prompts are refused; None: prompts that an empty device tier cannot hold."""

    def __post_init__(self) -> None:
        for name, least in (("window", 1), ("admissions_per_step", 1), ("waiting", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if not 0 < self.step_ms < float("inf"):
            raise ConfigError(f"--step-ms must be above 0, got {self.step_ms}")
        if self.told not in TOLD:
            raise ConfigError(f"--told must be one of {', '.join(TOLD)}, got {self.told!r}")
        if not 1 <= self.told_error < float("inf"):
            raise ConfigError(f"--told-error must be a factor of at least 1, got {self.told_error}")
        for tier, num_blocks in (("device", self.config.num_device_blocks), ("host", self.config.num_host_blocks)):
            if num_blocks > MAX_BLOCKS:
                raise ConfigError(f"--{tier}-blocks must be at most {MAX_BLOCKS}, got {num_blocks}")

    def service_ms(self, request: TraceRequest) -> float:
        """Simulated time of a request. In an open loop it takes none."""
        return max(1, request.output_length) * self.step_ms if self.closed_loop else 0.0

    def delay_ms(self, request: TraceRequest, following: TraceRequest) -> float:
        """From the end of a request to the next one of its session."""
        if self.closed_loop and following.delay_ms is not None:
            return following.delay_ms
        return max(0.0, following.timestamp_ms - request.timestamp_ms - self.service_ms(request))


@dataclass
class ReplayedRequest:
    """A request of the trace on its way through the manager."""

    request_id: str
    request: TraceRequest
    sequence: GivenHashes
    seconds: float = 0.0
    """Time in the manager so far, including attempts without space."""
    step: int = -1
    """Its last forward pass."""
    shadow: ShadowRequest | None = None


class Replay:
    """One run over one trace. Counters are valid at any time. Not thread-safe.

    A request starts as soon as it has a slot and blocks, for which the oldest open one ends.
    """

    def __init__(self, options: ReplayOptions) -> None:
        self.options = options
        self.now_ms = 0.0
        self.manager = CacheManager(options.config, self.clock)
        self.hasher = TraceHasher(options.config.block_size)
        self.request_seconds = array("d")
        """match + allocate + commit + finish of each finished request."""
        self.num_input_tokens = 0
        self.num_device_hit_tokens = 0
        self.num_host_hit_tokens = 0
        self.num_swap_out_copies = 0
        self.num_swap_in_copies = 0
        self.num_steps = 0
        self.num_no_space = 0
        self.num_too_long = 0
        """Requests that this size refuses."""
        self.num_outputs_cut = 0
        """Requests without output blocks: an empty tier cannot hold them, or no request could make room."""
        sizes = options.config.num_device_blocks, options.config.num_host_blocks
        self.shadow = ShadowDataPlane(*sizes) if options.verify else None
        self._trace: Iterator[TraceRequest] = iter(())
        self._line: deque[ReplayedRequest] = deque()
        """Waiting requests, the next one first; empty at the end of the trace."""
        self._open: OrderedDict[str, ReplayedRequest] = OrderedDict()
        self._generating: list[ReplayedRequest] = []

    def clock(self) -> float:
        """Seconds of the trace."""
        return self.now_ms / 1000

    def run(self, requests: Iterable[TraceRequest]) -> None:
        """Play and finish all `requests`. Raises `InvariantError` for an error or a leak in the manager."""
        self._trace = iter(requests)
        self._let_arrive()
        while self._line or self._generating:
            num_finished = len(self.request_seconds)
            if not self._step() and self._line and len(self.request_seconds) == num_finished:
                raise self._leak()
        while self._make_room():
            pass
        self._run_step([])
        self.manager.check_idle()

    def _step(self) -> bool:
        """Admit requests and run them. False: none runs."""
        members = self._grow_outputs()
        self._admit(members)
        self._run_step(members)
        return bool(members)

    def _leak(self) -> InvariantError:
        return InvariantError(f"no room for {self._line[0].request_id} although nothing runs: blocks leaked")

    def _let_arrive(self) -> None:
        """Fill the queue from the trace."""
        while len(self._line) < max(1, self.options.waiting) and (request := next(self._trace, None)) is not None:
            self._queue(request)

    def _queue(self, request: TraceRequest) -> bool:
        """Queue a request. False: it is refused and counted."""
        most = self.options.max_input_tokens
        if not self._fits(request.input_length) or (most is not None and request.input_length > most):
            self.num_too_long += 1
            return False
        session = session_hint(request.session, return_in_s=request.return_in_s)
        sequence = GivenHashes(self.hasher.prompt_hashes(request), request.input_length, session)
        self._line.append(ReplayedRequest(f"line-{request.line}", request, sequence))
        return True

    def _fits(self, num_tokens: int) -> bool:
        return num_tokens <= self.options.config.num_device_blocks * self.options.config.block_size

    def _admit(self, members: list[ReplayedRequest]) -> None:
        """Admit waiting requests to this step, and finish the oldest ones for their room."""
        self.manager.expect([waiting.sequence for waiting in islice(self._line, self.options.waiting)])
        for _ in range(self.options.admissions_per_step):
            while self._line and not self._try_admit(self._line[0]):
                if not self._make_room():
                    return
            if not self._line:
                return
            members.append(self._line.popleft())
            self._let_arrive()

    def _try_admit(self, opened: ReplayedRequest) -> bool:
        """Match and allocate. False, without a change, if the window is full or blocks lack."""
        if len(self._open) >= self.options.window:
            return False
        self._arrive(opened.request)
        begin = perf_counter()
        match = self.manager.match_prefix(opened.request_id, opened.sequence)
        allocation = self.manager.allocate(opened.request_id, opened.request.input_length)
        if isinstance(allocation, NoSpace):
            self.manager.release(opened.request_id)
        opened.seconds += perf_counter() - begin
        if isinstance(allocation, NoSpace):
            self.num_no_space += 1
            return False
        opened.step = self.num_steps
        self._open[opened.request_id] = opened
        self.num_input_tokens += opened.request.input_length
        self.num_device_hit_tokens += allocation.num_device_tokens
        self.num_host_hit_tokens += allocation.num_host_tokens
        if self.shadow is not None:
            opened.shadow = ShadowRequest(opened.request_id)
            opened.shadow.plan(self.manager.block_table(opened.request_id), opened.sequence.hashes, match.num_blocks)
        return True

    def _arrive(self, request: TraceRequest) -> None:
        self.now_ms = max(self.now_ms, request.timestamp_ms)

    def _told_at_end(self, opened: ReplayedRequest) -> float | None:
        """Seconds from now to the return that its client told. An open loop ends requests late."""
        told = opened.request.return_in_s
        if told is None or told == LAST_TURN:
            return told
        return max(0.0, told - (self.now_ms - opened.request.timestamp_ms) / 1000)

    def _grow_outputs(self) -> list[ReplayedRequest]:
        """Let the requests of the last step compute all their output tokens in one step."""
        members: list[ReplayedRequest] = []
        for opened in self._generating:
            if opened.request_id not in self._open:  # finished early for another request
                continue
            request, sequence = opened.request, opened.sequence
            if not self._fits(request.input_length + request.output_length - 1):
                self.num_outputs_cut += 1
                continue
            first_written = request.input_length // self.options.config.block_size
            sequence.hashes = [*sequence.hashes, *self.hasher.output_hashes(request)]
            sequence.num_tokens = request.input_length + request.output_length
            opened.step = self.num_steps  # part of this step, so others must not end it
            begin = perf_counter()
            allocation = self.manager.allocate(opened.request_id, sequence.num_tokens - 1)
            while isinstance(allocation, NoSpace):
                self.num_no_space += 1
                if not self._make_room():
                    break
                allocation = self.manager.allocate(opened.request_id, sequence.num_tokens - 1)
            opened.seconds += perf_counter() - begin
            if isinstance(allocation, NoSpace):
                self.num_outputs_cut += 1
                opened.step = self.num_steps - 1
                continue
            if opened.shadow is not None:
                opened.shadow.plan(self.manager.block_table(opened.request_id), sequence.hashes, first_written)
            members.append(opened)
        self._generating = []
        return members

    def _run_step(self, members: list[ReplayedRequest]) -> None:
        """One step of worker and scheduler: copies, forward, commit."""
        step = self.manager.take_swap_step()
        self.num_swap_out_copies += len(step.swap_out)
        self.num_swap_in_copies += len(step.swap_in)
        if self.shadow is not None:
            self.shadow.run_step(step, [opened.shadow for opened in members if opened.shadow is not None])
            if self.num_steps % STEPS_BETWEEN_CHECKS == 0:
                self.manager.check()
        self.num_steps += 1
        for opened in members:
            grown = opened.sequence.num_tokens > opened.request.input_length
            # The newest token is sampled and has no KV yet.
            if not grown:
                opened.sequence.num_tokens += 1
            begin = perf_counter()
            self.manager.commit(opened.request_id, opened.sequence.num_tokens - 1)
            opened.seconds += perf_counter() - begin
            if not grown and self.options.outputs and opened.request.output_length > 1:
                self._generating.append(opened)

    def _make_room(self) -> bool:
        """Finish the oldest request whose forward pass is done. False: all are in their pass."""
        for opened in self._open.values():
            if opened.step < self.num_steps:
                self._finish(opened)
                return True
        return False

    def _finish(self, opened: ReplayedRequest) -> None:
        del self._open[opened.request_id]
        sequence = opened.sequence
        sequence.session = sequence.session._replace(
            return_in_s=self._told_at_end(opened), calls_tool=opened.request.tool_call
        )
        begin = perf_counter()
        self.manager.finish(opened.request_id)
        self.request_seconds.append(opened.seconds + perf_counter() - begin)
        if self.shadow is not None:
            self.shadow.finish(opened.request_id)
