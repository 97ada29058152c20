"""The tokens of one FastDeploy request as block hashes."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError
from ...metadata import BlockHash, CacheAccess
from ...scheduler.cache_utils import BlockHasher, MultimodalItem
from ..cache_identity import access_of, salt_of

logger = logging.getLogger(__name__)


Item = tuple[int, int, str]
"""The fields of a `MultimodalItem`."""

_ITEM_FIELDS = ("mm_positions", "mm_hashes")


class TaskTokens:
    """Satisfies `metadata.BlockHashes` for a FastDeploy `Request`; `catch_up` hashes the tokens that are new.

    A request whose tokens cannot be hashed (overlapping images, negative ids, a salt that is no text, whatever else a
    client sent) is served without caching.
    """

    def __init__(self, task: Any, block_size: int, items: Sequence[Item] | None = None) -> None:
        """`items`: the images, videos and audios of its prompt, None for those that it tells itself."""
        self.task = task
        self.are_reusable = False
        """False with images: FastDeploy may rewrite the images of a waiting request."""
        self.tokens_before_wait: int | None = None
        """Cached tokens when it began to wait for a prefix that another request computes; None if it did not."""
        self._num_output = 0
        self._prompt_length = len(task.prompt_token_ids)
        self._hasher: BlockHasher | None = None
        self.access = CacheAccess(reads=False, writes=False)
        try:
            self.are_reusable = not has_items(task)
            self.access = access_of(task)
            found = multimodal_items(task) if items is None else [MultimodalItem(*item) for item in items]
            self._hasher = BlockHasher(block_size, items=found, salt=salt_of(task))
            self._hasher.extend(task.prompt_token_ids)
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

    def token_ids(self) -> list[int]:
        """Those that are hashed. O(tokens)."""
        return [int(token) for token in (*self.task.prompt_token_ids, *self.task.output_token_ids[: self._num_output])]

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
        """Do these hashes, if they are reusable, still describe `task`?"""
        return (
            self.task is task
            and (self._hasher is None or not has_items(task))
            and len(task.prompt_token_ids) == self._prompt_length
            and len(task.output_token_ids) >= self._num_output
        )

    def _give_up(self, error: Exception) -> None:
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        logger.warning(
            "request %s is served without the cache, its tokens cannot be hashed: %s", self.task.request_id, reason
        )
        self._hasher = None
        self.are_reusable = True  # there is nothing that could be out of date, and one warning is enough


def has_items(task: Any) -> bool:
    """Did FastDeploy find images, videos or audios? If not, there may be None, {}, or a dict of empty lists."""
    inputs = task.multimodal_inputs
    return bool(inputs) and any(inputs.get(name) is not None and len(inputs[name]) for name in _ITEM_FIELDS)


def multimodal_items(task: Any) -> list[MultimodalItem]:
    """The images, videos and audios that FastDeploy found in the prompt."""
    if not has_items(task):
        return []
    given = (task.multimodal_inputs.get(name) for name in _ITEM_FIELDS)
    positions, hashes = ([] if each is None else each for each in given)
    if len(positions) != len(hashes):
        raise ConfigError(f"{len(positions)} multimodal positions, {len(hashes)} hashes")
    return [
        MultimodalItem(int(position.offset), int(position.length), f"{content} {grid}" if grid else str(content))
        for position, content, grid in zip(positions, hashes, _grids(task.multimodal_inputs, len(hashes)), strict=True)
        if position.length > 0
    ]


def _grids(inputs: Mapping[str, Any], num_items: int) -> list[str]:
    """Frames, height and width of each item, in patches; empty texts where FastDeploy has none.

    It hashes the bytes of an image, not its shape: two of one color, as many patches wide as the other is high, have
    equal hashes and lengths, and other positions. Where grids and items cannot be told apart, each has all grids.
    """
    given = inputs.get("grid_thw")
    if given is None or len(given) == 0:
        return [""] * num_items
    grids = [[int(number) for number in _flat(grid)] for grid in given]
    for each in ([part for grid in grids for part in _parts(grid)], grids):
        if len(each) == num_items:
            return [str(grid) for grid in each]
    return [str(grids)] * num_items


def _parts(grid: list[int]) -> list[list[int]]:
    """FastDeploy cuts a video into items of two frames, while it schedules; they are numbered here."""
    frames, *size = grid
    return [grid] if frames == 1 else [[2, *size, number] for number in range(frames // 2)]


def _flat(grid: Any) -> Any:
    """Processors give `[t, h, w]`, and `[[t, h, w]]` for an image that they have processed before."""
    return grid[0] if len(grid) == 1 else grid


def start_of_cut_item(items: Sequence[MultimodalItem], num_tokens: int, block_size: int) -> int:
    """The largest multiple of `block_size` up to `num_tokens` at which no item is cut in two."""
    for item in sorted(items, reverse=True):
        if item.offset < num_tokens < item.offset + item.length:
            num_tokens = item.offset // block_size * block_size
    return num_tokens
