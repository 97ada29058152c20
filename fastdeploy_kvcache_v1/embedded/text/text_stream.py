"""From sampled tokens to the text a client may see."""

from __future__ import annotations

from collections.abc import Sequence

from .tokenizer import Detokenizer


class TextStream:
    """Text of one request, cut before its first stop string.

    Holds back an end that could still grow into a stop string, so nothing that was released is ever taken back.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = tuple(stops)
        self._pending = ""
        self.stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Text that may be shown now; sets `stopped` at a stop string unless `may_stop` is False."""
        self._pending += self._detokenizer.push(token_id)
        if may_stop:
            return self._release()
        released, self._pending = self._pending, ""
        return released

    def flush(self) -> str:
        """The rest, at the end of the output."""
        self._pending += self._detokenizer.flush()
        released = self._release()
        if self.stopped:
            return released
        released, self._pending = released + self._pending, ""
        return released

    def _release(self) -> str:
        found = [index for stop in self._stops if (index := self._pending.find(stop)) >= 0]
        if found:
            released, self._pending = self._pending[: min(found)], ""
            self.stopped = True
            return released
        keep = max((_overlap(self._pending, stop) for stop in self._stops), default=0)
        cut = len(self._pending) - keep
        released, self._pending = self._pending[:cut], self._pending[cut:]
        return released


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    return next((size for size in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:size])), 0)
