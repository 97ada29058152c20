"""The tokens of one host request as block hashes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from ..cache_utils import BlockHasher, MultimodalItem
from ..errors import ConfigError
from ..metadata import BlockHash

logger = logging.getLogger(__name__)


class TaskTokens:
    """Satisfies `metadata.BlockHashes` for a host `Request`; `catch_up` hashes the tokens that are new.

    A request whose tokens cannot be hashed (overlapping images, negative ids) is served without caching.
    """

    def __init__(self, task: Any, block_size: int) -> None:
        self.task = task
        self._num_output = 0
        self._prompt_length = len(task.prompt_token_ids)
        self._hasher: BlockHasher | None = None
        try:
            self._hasher = BlockHasher(block_size, items=multimodal_items(task))
            self._hasher.extend(task.prompt_token_ids)
        except ConfigError as error:
            self._give_up(error)
        self.catch_up()

    @property
    def hashes(self) -> Sequence[BlockHash]:
        return () if self._hasher is None else self._hasher.hashes

    @property
    def num_tokens(self) -> int:
        return self._prompt_length + self._num_output

    def catch_up(self) -> None:
        """Take over the tokens that the request has generated since the last call."""
        output = self.task.output_token_ids
        if len(output) > self._num_output:
            new = output[self._num_output :]
            self._num_output = len(output)
            if self._hasher is not None:
                try:
                    self._hasher.extend(new)
                except ConfigError as error:
                    self._give_up(error)

    def is_of(self, task: Any) -> bool:
        """Do these hashes still describe `task`? The host may rewrite the images of a waiting request."""
        return (
            self.task is task
            and not task.multimodal_inputs
            and len(task.prompt_token_ids) == self._prompt_length
            and len(task.output_token_ids) >= self._num_output
        )

    def _give_up(self, error: ConfigError) -> None:
        logger.warning("request %s is not cached: %s", self.task.request_id, error)
        self._hasher = None


def multimodal_items(task: Any) -> list[MultimodalItem]:
    """The images, videos and audios that the host found in the prompt."""
    inputs = task.multimodal_inputs or {}
    positions, hashes = inputs.get("mm_positions") or [], inputs.get("mm_hashes") or []
    if len(positions) != len(hashes):
        raise ConfigError(f"{len(positions)} multimodal positions, {len(hashes)} hashes")
    return [
        MultimodalItem(int(position.offset), int(position.length), str(content))
        for position, content in zip(positions, hashes, strict=True)
        if position.length > 0
    ]


def start_of_cut_item(items: Sequence[MultimodalItem], num_tokens: int, block_size: int) -> int:
    """The largest multiple of `block_size` up to `num_tokens` at which no item is cut in two."""
    for item in sorted(items, reverse=True):
        if item.offset < num_tokens < item.offset + item.length:
            num_tokens = item.offset // block_size * block_size
    return num_tokens
