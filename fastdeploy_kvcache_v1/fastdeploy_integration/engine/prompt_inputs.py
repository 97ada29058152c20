"""What decides the KV of a prompt beside its token ids: pixels, and where the rotary embedding puts each token.

It is taken once, when a request arrives, on the thread that brings it. Later FastDeploy cuts videos into parts of two
frames, again each time that it matches the request, and makes tensors of the arrays.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from math import prod
from typing import TYPE_CHECKING, Any

from ...errors import ConfigError
from ...scheduler.block_hashing import MultimodalItem

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

ATTRIBUTE = "_kvcache_v1_inputs"
"""Of a request: its `PromptInputs`."""

ITEM_FIELDS = ("mm_positions", "mm_hashes", "images")
"""A prompt with one of them has images or videos."""
LATE_FIELDS = tuple(f"{kind}_{what}" for kind in ("image", "video", "audio") for what in ("feature_urls", "features"))
PLACEHOLDERS = ("image_patch_id", "video_patch_id", "audio_patch_id")

AXES = 3
"""Time, height and width."""

Sent = tuple[tuple[tuple[int, int, str], ...], int | None, Any]
"""What a decode server is told: items, tokens that can be named, mask offsets. It has the positions."""


@dataclass(frozen=True, eq=False)
class PromptInputs:
    """Of one prompt."""

    items: tuple[MultimodalItem, ...] = ()
    rows: TokenRows | None = None
    """None where token ids and items say all."""
    num_named: int | None = None
    """Leading tokens that can be named, None for all. Behind them are features that are not here yet."""
    refusal: str | None = None
    """Why the prompt cannot be named."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Workers have no use for it, and requests travel to them pickled: None arrives."""
        return type(None), ()

    def to_send(self) -> Sent:
        items = tuple((offset, length, content) for offset, length, content in self.items)
        return items, self.num_named, None if self.rows is None else self.rows.masks


NO_INPUTS = PromptInputs()


def inputs_of(task: Any) -> PromptInputs:
    """As they were when it was asked for the first time. Never raises: what a client sent must not hold up others."""
    inputs = task.multimodal_inputs
    if not inputs and ATTRIBUTE not in vars(task):
        return NO_INPUTS
    known = vars(task).get(ATTRIBUTE)
    if not isinstance(known, PromptInputs):  # clients can name attributes, and fill them with JSON
        try:
            known = _taken(inputs, task.prompt_token_ids) if inputs else NO_INPUTS
        except Exception as error:  # the edge to what clients send
            known = PromptInputs(refusal=str(error) if isinstance(error, ConfigError) else repr(error))
        setattr(task, ATTRIBUTE, known)
    return known


def received_inputs(sent: Sent, task: Any) -> PromptInputs:
    """At decode: those that prefill took, with the positions that FastDeploy sends. May raise anything."""
    items, num_named, masks = sent
    inputs = task.multimodal_inputs or {}
    rows = token_rows(inputs.get("position_ids"), masks)
    return PromptInputs(tuple(MultimodalItem(*item) for item in items), rows, num_named)


def _taken(inputs: Mapping[str, Any], prompt: Any) -> PromptInputs:
    rows = token_rows(inputs.get("position_ids"), inputs.get("attention_mask_offset"))
    if any(_has(inputs, name) for name in LATE_FIELDS):
        return PromptInputs((), rows, _first_placeholder(inputs, prompt))
    return PromptInputs(tuple(_items(inputs)), rows)


def _has(inputs: Mapping[str, Any], name: str) -> bool:
    """FastDeploy leaves out what a prompt lacks, or has None or an empty list."""
    return inputs.get(name) is not None and len(inputs[name]) > 0


def _first_placeholder(inputs: Mapping[str, Any], prompt: Any) -> int:
    """Tokens before the first one of an item; 0 where that cannot be told."""
    ids = {int(inputs[name]) for name in PLACEHOLDERS if inputs.get(name) is not None}
    return next((index for index, token in enumerate(prompt) if token in ids), 0)


def _items(inputs: Mapping[str, Any]) -> Iterator[MultimodalItem]:
    """Named by their pixels: `mm_hashes` are what a client gives as `uuid`, or hashes of bytes without a shape.

    A video is cut into two steps of time each, as FastDeploy computes it: two videos share how they begin.
    """
    if not any(_has(inputs, name) for name in ITEM_FIELDS):
        return
    positions, grids, pixels = (inputs.get(name) for name in ("mm_positions", "grid_thw", "images"))
    if positions is None or grids is None or pixels is None:
        raise ConfigError("got images or videos without mm_positions, grid_thw or images")
    rows = _array(pixels, "iufb")
    shapes = [_shape(grid) for grid in grids]
    if len(shapes) != len(positions):  # FastDeploy has cut it before
        shapes = [part for shape in shapes for part in _parts(shape)]
    if len(shapes) != len(positions) or sum(map(prod, shapes)) != len(rows) or any(min(shape) < 1 for shape in shapes):
        raise ConfigError(f"{len(positions)} images or videos do not fit grids {shapes} and {len(rows)} pixel rows")
    first = 0
    for position, shape in zip(positions, shapes, strict=True):
        parts, offset = _parts(shape), int(position.offset)
        if position.length % len(parts):
            parts = [shape]
        for part in parts:
            end, num_tokens = first + prod(part), int(position.length) // len(parts)
            if num_tokens:
                yield MultimodalItem(offset, num_tokens, f"{_digest(rows[first:end])} {part}")
            first, offset = end, offset + num_tokens


Shape = tuple[int, ...]
"""Steps of time, height and width of an item in patches."""


def _shape(grid: Any) -> Shape:
    """Processors give `[t, h, w]`, and `[[t, h, w]]` for an image that they have processed before."""
    frames, height, width = map(int, grid[0] if len(grid) == 1 else grid)
    return frames, height, width


def _parts(shape: Shape) -> list[Shape]:
    """FastDeploy's processors make an even number of steps."""
    frames, *size = shape
    return [shape] if frames % 2 else [(2, *size)] * (frames // 2)


def _digest(rows: npt.NDArray[Any]) -> str:
    """Of what is in them, and of what the bytes are. Gives the interpreter lock away."""
    digest = sha256(f"{rows.dtype.str} {rows.shape[1:]} ".encode())
    digest.update(rows.reshape(-1).view("u1").data)
    return digest.hexdigest()


def _array(given: Any, kinds: str) -> npt.NDArray[Any]:
    """Contiguous. Raises `ConfigError` for what is no array of numbers."""
    import numpy as np

    made = np.ascontiguousarray(given)
    if made.dtype.kind not in kinds:
        raise ConfigError(f"expected an array of numbers, got {type(given).__name__} of {made.dtype}")
    return made


def token_rows(positions: Any, masks: Any) -> TokenRows | None:
    """None where they are those of text. Raises `ConfigError`."""
    import numpy as np  # text needs none of it

    known = None
    if positions is not None:
        known = _array(positions, "iu").astype("<i8", copy=False)
        if known.ndim != 2 or known.shape[1] != AXES:
            raise ConfigError(f"position_ids must have a row of {AXES} numbers for each token, got shape {known.shape}")
        if (known == np.arange(len(known))[:, None]).all():
            known = None
    given = None if masks is None else _array(masks, "iu").astype("<i8", copy=False)
    return None if known is None and given is None else TokenRows(known, given)


class TokenRows:
    """The rotary positions of each token, and its offset in the attention mask where there is one."""

    def __init__(self, positions: npt.NDArray[np.int64] | None, masks: npt.NDArray[np.int64] | None) -> None:
        """None for those of text."""
        self.masks = masks
        self._positions = positions
        self._is_moved: Any = None if positions is None else (positions != _text_rows(0, len(positions))).any(axis=1)
        self._next = 0 if positions is None else int(positions.max()) + 1

    def __call__(self, start: int, end: int) -> bytes:
        """Of the tokens `[start, end)`; empty where they are at `(i, i, i)`. Different for different rows."""
        return self._positions_of(start, end) + self._masks_of(start, end)

    def _positions_of(self, start: int, end: int) -> bytes:
        """Behind the last row FastDeploy goes on with the next number that none has, on all axes."""
        if self._positions is None:
            return b""
        length = len(self._positions)
        is_moved = self._is_moved[start:end].any() or (end > length and self._next != length)
        if not is_moved:
            return b""
        rows = self._positions[start:end].tobytes()
        if end > length:
            rows += (_text_rows(max(start, length), end) - length + self._next).tobytes()
        return b"positions" + rows

    def _masks_of(self, start: int, end: int) -> bytes:
        if self.masks is None:
            return b""
        rows = self.masks[start:end]
        return b"masks" + struct.pack("<Q", rows.size) + rows.tobytes() if rows.size else b""


def _text_rows(start: int, end: int) -> npt.NDArray[np.int64]:
    """`(i, i, i)` for each token."""
    import numpy as np

    return np.arange(start, end, dtype="<i8").repeat(AXES).reshape(-1, AXES)
