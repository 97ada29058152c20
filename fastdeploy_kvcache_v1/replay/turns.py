"""Which line of a trace is the turn before another one, in the words of each format.

Mooncake's format, as its users extend it, has `session_id`, the same in all lines of a session, and `delay`,
milliseconds between the end of the turn before and this one. Qwen-Bailian has `chat_id` and `parent_chat_id`.
"""

from __future__ import annotations

from typing import Any

ROOT = -1
"""The `parent_chat_id` of a first turn."""

Name = int | str


class Turns:
    """Remembers the last line of every session, and the line of every chat. Not thread-safe."""

    def __init__(self) -> None:
        self._sessions: dict[Name, int] = {}
        self._chats: dict[Name, int] = {}

    def follow(self, number: int, fields: dict[str, Any]) -> int | None:
        """The line that line `number` follows; None for a first turn, and where the turn before is not in the trace.

        Raises `ValueError` saying which field is wrong.
        """
        before = None
        session, chat = _name(fields, "session_id"), _name(fields, "chat_id")
        if session is not None:
            before = self._sessions.get(session)
            self._sessions[session] = number
        if chat is not None:
            parent = _name(fields, "parent_chat_id")
            if parent not in (None, ROOT):
                before = self._chats.get(parent)
            self._chats[chat] = number
        return before


def _name(fields: dict[str, Any], key: str) -> Name | None:
    value = fields.get(key)
    if value is None or (isinstance(value, int | str) and not isinstance(value, bool)):
        return value
    raise ValueError(f"{key} must be an integer or a text")
