"""SessionHint: which session a request belongs to, and when that session sends its next request."""

from __future__ import annotations

from hashlib import blake2b
from typing import NamedTuple

NAME_BYTES = 16

LAST_TURN = -1.0
"""Value of `return_in_s` for a session that sends no more requests."""

MAX_RETURN_S = 30 * 86_400.0

MAX_ID_CHARACTERS = 1024


class SessionHint(NamedTuple):
    """What a client tells about the session of a request. It decides who leaves the cache first, never what a request
    reads.
    """

    name: bytes = b""
    """Digest of tenant and session id; empty if the client names no session."""
    tenant: bytes = b""
    """Digest of the salt, empty without one. How often told times held is counted by tenant."""
    return_in_s: float | None = None
    """Seconds from the end of this request to the next one of its session, `LAST_TURN`, or None: not told."""
    calls_tool: bool = False
    """Set by servers at the end of a request: its answer ends in a tool call."""


UNTOLD = SessionHint()


def session_hint(session_id: str | None, salt: bytes = b"", return_in_s: float | None = None) -> SessionHint:
    """Make a hint. Equal ids under different salts are different sessions. An empty id counts as none."""
    tenant = _digest(salt) if salt else b""
    name = _digest(tenant, session_id.encode("utf-8", "surrogatepass")) if session_id else b""
    return SessionHint(name, tenant, return_in_s)


def checked_return(value: object) -> float:
    """Return a client's `return_in_s` as a number. Raises `ValueError` with one line for any other value."""
    number = value if isinstance(value, int | float) and not isinstance(value, bool) else -2
    if number == LAST_TURN or 0 <= number <= MAX_RETURN_S:
        return float(number)
    raise ValueError(
        f"return_in_s must be a number of seconds from 0 to {MAX_RETURN_S:.0f}, or -1 for a session that has ended"
    )


def checked_session_id(value: object) -> str:
    """Return a client's session id. Raises `ValueError`, without the value, for one that is no text or too long."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_ID_CHARACTERS:
        raise ValueError(f"a session id must be a text of 1 to {MAX_ID_CHARACTERS} characters; leave it out for none")
    return value


def _digest(*parts: bytes) -> bytes:
    digest = blake2b(digest_size=NAME_BYTES)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.digest()
