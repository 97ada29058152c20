"""The tokens of one FastDeploy request as block hashes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ...contract.messages import BlockHash, CacheAccess
from ...contract.sessions import UNTOLD
from ...contract.tool_calls import ends_in_tool_call
from ...errors import ConfigError
from ...scheduler.block_hashing import BlockHasher
from ..cache_identity import access_of, salt_of, session_of
from .prompt_inputs import PromptInputs, inputs_of

logger = logging.getLogger(__name__)


class TaskTokens:
    """Satisfies `messages.BlockHashes` for a FastDeploy `Request`; `catch_up` hashes the tokens that are new.

    A request whose tokens cannot be hashed (overlapping images, negative ids, a salt that is no text, whatever else a
    client sent) is served without caching; one with features that are not here yet, as far as the first of them.
    """

    def __init__(self, task: Any, block_size: int, inputs: PromptInputs | None = None) -> None:
        """`inputs`: what its prompt has beside token ids, None for what it tells itself."""
        self.task = task
        self.uncached: str | None = None
        """Why tokens of it are not cached, as the metric `uncached_requests` counts it; None where all may be."""
        self.tokens_before_wait: int | None = None
        """Cached tokens when it began to wait for a prefix that another request computes; None if it did not."""
        self._num_output = 0
        self._prompt_length = len(task.prompt_token_ids)
        self._hasher: BlockHasher | None = None
        self.access = CacheAccess(reads=False, writes=False)
        self.session = UNTOLD
        self._num_named: int | None = None
        try:
            inputs = inputs_of(task) if inputs is None else inputs
            if inputs.refusal is not None or inputs.num_named is not None:
                self.uncached, self._num_named = "items", inputs.num_named
            if inputs.refusal is not None:
                raise ConfigError(inputs.refusal)
            self.access = access_of(task)
            salt = salt_of(task)
            self.session = session_of(task, salt)
            self._hasher = BlockHasher(block_size, items=inputs.items, rows=inputs.rows, salt=salt)
            prompt = task.prompt_token_ids
            self._hasher.extend(prompt if self._num_named is None else prompt[: self._num_named])
        except Exception as error:  # the edge to what clients send: it must not hold up the requests behind this one
            self._give_up(error)
        self.catch_up()

    @property
    def hashes(self) -> Sequence[BlockHash]:
        return () if self._hasher is None else self._hasher.hashes

    @property
    def num_tokens(self) -> int:
        return self._prompt_length + self._num_output

    @property
    def num_prompt_tokens(self) -> int:
        return self._prompt_length

    @property
    def num_plain_blocks(self) -> int:
        return 0 if self._hasher is None else self._hasher.num_plain_blocks

    def see_end(self, tool_call_ends: frozenset[int]) -> None:
        """The request has ended. `tool_call_ends`: tokens of the model, see `tool_calls`."""
        calls_tool = ends_in_tool_call(self.task.output_token_ids, tool_call_ends)
        self.session = self.session._replace(calls_tool=calls_tool)

    def token_ids(self) -> list[int]:
        """Those that are hashed. O(tokens)."""
        return [int(token) for token in (*self.task.prompt_token_ids, *self.task.output_token_ids[: self._num_output])]

    def catch_up(self) -> None:
        """Take over the tokens that the request has generated since the last call."""
        output = self.task.output_token_ids
        if len(output) > self._num_output:
            new = output[self._num_output :]
            self._num_output = len(output)
            if self._hasher is not None and self._num_named is None:
                try:
                    self._hasher.extend(new)
                except ConfigError as error:
                    self._give_up(error)

    def is_of(self, task: Any) -> bool:
        """Do these hashes, if they are reusable, still describe `task`?"""
        return (
            self.task is task
            and len(task.prompt_token_ids) == self._prompt_length
            and len(task.output_token_ids) >= self._num_output
        )

    def _give_up(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        logger.warning(
            "request %s is served without the cache, its tokens cannot be hashed: %s", self.task.request_id, reason
        )
        self._hasher = None
        self.uncached = self.uncached or "tokens"


def start_of_cut_item(task: Any, num_tokens: int, block_size: int) -> int:
    """The largest multiple of `block_size` up to `num_tokens` at which FastDeploy sees no item cut in two."""
    positions = (task.multimodal_inputs or {}).get("mm_positions") or ()
    for offset, length in sorted(((each.offset, each.length) for each in positions), reverse=True):
        if offset < num_tokens < offset + length:
            num_tokens = int(offset) // block_size * block_size
    return num_tokens
