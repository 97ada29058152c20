"""The batch rows of the worker: their sequences, next computation and end. Needs no FastDeploy and no Paddle.

States of a row; `computed` and `target` count tokens of the sequence:

    computed < target, blocks cover target     computed in the next step
    computed < target, too few blocks          waits for a decode task with a longer block table
    computed == target < number of tokens      a chunk is done: waits for the next prefill task
    closing                                    a stop sequence matched: the next step emits the end token
    failed, computed < target                  takes the remaining chunks without computing; the last emits FAILED
    released                                   preempted or aborted: the next step emits RELEASED once

FastDeploy sends all chunks of a prompt at once and reuses row and blocks after FAILED, so that comes with the last
chunk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ...errors import CacheStateError
from ..model.sampler import SamplingParams

NO_TOKEN = -1
"""No message of the row in this step."""

FAILED = -3
"""FastDeploy ends the request with an error message."""

RELEASED = -9
"""The row is free: FastDeploy reschedules the preempted request, or ends the aborted one."""


@dataclass(frozen=True)
class FinishRules:
    """Rules by which FastDeploy's GPU kernels end a sequence."""

    end_tokens: tuple[int, ...]
    """At least one. The first is emitted at the end for another reason."""
    max_tokens: int
    """The end token replaces the token with this number."""
    min_tokens: int = 0
    """Output tokens before end tokens may be sampled and stop sequences count."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()


@dataclass
class RunningSequence:
    request_id: str
    tokens: list[int]
    """Prompt and output so far."""
    prompt_length: int
    computed: int
    """Tokens with KV in the cache."""
    target: int
    """Tokens with KV in the cache after the next step."""
    block_table: list[int]
    rules: FinishRules
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Without the tokens that are banned for now."""
    closing: bool = False
    failed: bool = False
    num_retries: int = 0

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def samples(self) -> bool:
        """The next step computes the last known token, so it samples."""
        return self.target == len(self.tokens)

    @property
    def ends(self) -> bool:
        """The next step emits its last message and computes nothing of it."""
        return self.closing or (self.failed and self.samples)

    @property
    def may_end(self) -> bool:
        """An end token may be sampled now."""
        return self.num_outputs >= self.rules.min_tokens

    def is_runnable(self, block_size: int) -> bool:
        return not (self.closing or self.failed) and self.computed < self.target <= len(self.block_table) * block_size

    def matches_stop(self) -> bool:
        outputs = self.tokens[self.prompt_length :]
        return any(tuple(outputs[-len(stop) :]) == stop for stop in self.rules.stop_sequences if stop)


@dataclass
class BatchRows:
    """Not thread-safe: for the worker's loop."""

    block_size: int
    sequences: dict[int, RunningSequence] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)

    def start(self, row: int, sequence: RunningSequence) -> None:
        """A prefill task: the next chunk of the sequence on `row`, or a new sequence."""
        if not 0 <= sequence.computed < sequence.target <= len(sequence.tokens):
            raise CacheStateError(
                f"got tokens [{sequence.computed}, {sequence.target}) of request {sequence.request_id}, "
                f"expected a part of its {len(sequence.tokens)}: report this"
            )
        self.released.discard(row)
        before = self.sequences.get(row)
        if before is not None and before.request_id == sequence.request_id:
            sequence.failed = before.failed
            if not sequence.failed:
                sequence.computed = min(sequence.computed, before.computed)  # the last chunk may be retried
        self.sequences[row] = sequence
        # Another server may have sampled the token that a stop sequence ends with.
        sequence.closing = sequence.samples and sequence.may_end and sequence.matches_stop()

    def set_blocks(self, row: int, block_table: Sequence[int]) -> None:
        """A decode task. Ignored for a sequence that ended before FastDeploy knew."""
        if row in self.sequences:
            self.sequences[row].block_table = list(block_table)

    def release(self, row: int) -> None:
        """A preempt or abort task."""
        self.sequences.pop(row, None)
        self.released.add(row)

    def drop_started(self) -> None:
        """Forget sequences with an output token, which another server continues."""
        for row in [row for row, sequence in self.sequences.items() if sequence.num_outputs]:
            del self.sequences[row]

    def clear(self) -> None:
        self.sequences.clear()
        self.released.clear()

    def runnable(self) -> dict[int, RunningSequence]:
        """Rows to compute in the next step, in row order."""
        rows = sorted(self.sequences.items())
        return {row: sequence for row, sequence in rows if sequence.is_runnable(self.block_size)}

    @property
    def has_work(self) -> bool:
        """The next step computes or emits something."""
        return bool(self.released) or any(
            sequence.ends or sequence.is_runnable(self.block_size) for sequence in self.sequences.values()
        )

    def end_step(self, num_rows: int, computed: dict[int, RunningSequence], sampled: dict[int, int]) -> list[int]:
        """End a step that computed the rows of `computed` and sampled `sampled`. Returns the message by row.

        It has `num_rows` rows, or more if a later row was released.
        """
        message = [NO_TOKEN] * max([num_rows, *(row + 1 for row in self.released)])
        for row in self.released:
            message[row] = RELEASED
        self.released.clear()
        for row, sequence in list(self.sequences.items()):
            if sequence.ends:
                message[row] = FAILED if sequence.failed else sequence.rules.end_tokens[0]
                del self.sequences[row]
        for row, sequence in computed.items():
            sequence.computed, sequence.num_retries = sequence.target, 0
            if row in sampled:
                message[row] = self._append(row, sequence, sampled[row])
        return message

    def fail(self, row: int) -> int:
        """The sequence on `row` cannot continue. Returns the row's message."""
        self.sequences[row].failed = True
        if not self.sequences[row].samples:
            return NO_TOKEN
        del self.sequences[row]
        return FAILED

    def _append(self, row: int, sequence: RunningSequence, token: int) -> int:
        if sequence.num_outputs + 1 >= sequence.rules.max_tokens:
            token = sequence.rules.end_tokens[0]
        sequence.tokens.append(token)
        sequence.target = len(sequence.tokens)
        if token in sequence.rules.end_tokens:
            del self.sequences[row]
        elif sequence.num_outputs >= sequence.rules.min_tokens and sequence.matches_stop():
            sequence.closing = True
        return token
