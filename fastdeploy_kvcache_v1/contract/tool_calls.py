"""Answers that end in a tool call: the next prompt of their session comes as soon as the tool is done."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

ENDS = frozenset(
    {
        "</tool_call>",
        "</tool_calls>",
        "</function_call>",
        "</minimax:tool_call>",
        "<end_function_call>",
        "<|/tool_call|>",
        "<|tool_call_end|>",
        "<|tool_calls_section_end|>",
        "<\uff5ctool\u2581calls\u2581end\uff5c>",
        "<|END_ACTION|>",
        "<|call|>",
        "<|eom_id|>",
    }
)
"""Tokens with which chat templates end a tool call. Each is one token where a tokenizer has it."""

LAST = 8
"""Tokens at the end of an answer among which that token may stand: others close the turn."""


class _Token(msgspec.Struct):
    content: str
    id: int = -1


class _Tokenizer(msgspec.Struct):
    added_tokens: list[_Token] = []
    added_tokens_decoder: dict[int, _Token] = {}


def tool_call_ends(model: Path) -> frozenset[int]:
    """Return the ids of `ENDS` in the tokenizer of a model directory; none where its files cannot be read."""
    ids: dict[str, int] = {}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        with suppress(OSError, msgspec.MsgspecError):
            tokenizer = msgspec.json.decode((model / name).read_bytes(), type=_Tokenizer)
            ids |= {token.content: token.id for token in tokenizer.added_tokens}
            ids |= {token.content: number for number, token in tokenizer.added_tokens_decoder.items()}
    with suppress(OSError, msgspec.MsgspecError):
        ids |= msgspec.json.decode((model / "added_tokens.json").read_bytes(), type=dict[str, int])
    return frozenset(ids[content] for content in ENDS & ids.keys())


def ends_in_tool_call(answer: Sequence[int], ends: frozenset[int]) -> bool:
    """True if one of the tokens `ends` stands at the end of `answer`. O(1)."""
    return bool(ends) and not ends.isdisjoint(answer[-LAST:])
