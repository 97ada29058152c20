"""AskedAgain: hashes of requests that a decode server had no room for. Prefill asks for each 20 times a second."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from ..engine.task_tokens import TaskTokens
from .transfer_name import name_of, sent_inputs

KEPT = 256


class AskedAgain:
    """By transfer name, the latest `KEPT`: one name has one prompt. The thread that preallocates owns it."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._kept: OrderedDict[str, TaskTokens] = OrderedDict()

    def tokens_of(self, request: Any) -> TaskTokens | None:
        """None where prefill has not named its images. O(its tokens) the first time. May raise anything, for what a
        client has sent.
        """
        tokens = self._kept.pop(str(name_of(request)), None)
        if tokens is not None:
            tokens.task = request  # FastDeploy makes another object each time that it is asked
            return tokens
        inputs = sent_inputs(request)
        return None if inputs is None else TaskTokens(request, self._block_size, inputs)

    def keep(self, tokens: TaskTokens) -> None:
        """The request got nothing."""
        self._kept[str(name_of(tokens.task))] = tokens
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
