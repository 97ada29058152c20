"""The request of a decode server to a prefill server, and its answer. Both sides know a secret."""

from __future__ import annotations

import hashlib
import hmac
from typing import Annotated

import msgspec

from ...contract.sessions import UNTOLD, SessionHint
from ..model.sampler import SamplingParams

__all__ = [
    "PATH",
    "PREFILL_HEADER",
    "PROOF_HEADER",
    "PrefillAnswer",
    "PrefillJob",
    "PrefillLine",
    "proof",
    "proves",
]

PATH = "/kvcache/prefill"

PROOF_HEADER = "X-KVCache-Proof"
"""Proves that the sender knows the secret: over the bytes of a `PrefillJob`, or over `PREFILL_HEADER`."""

PREFILL_HEADER = "X-KVCache-Prefill"
"""URL of the prefill server that a router chose."""

Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]
Port = Annotated[int, msgspec.Meta(gt=0, lt=65536)]


class PrefillJob(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt to compute and offer, and one token to sample behind it."""

    request_id: Name
    prompt_ids: Annotated[list[Annotated[int, msgspec.Meta(ge=0)]], msgspec.Meta(min_length=1)]
    sampling: SamplingParams
    """Of the first token."""
    decode_host: str
    decode_ports: Annotated[list[Port], msgspec.Meta(min_length=1, max_length=64)]
    """Where the decode server's workers listen, by rank."""
    cache_salt: str = ""
    reads_cache: bool = True
    writes_cache: bool = True
    session: SessionHint = UNTOLD
    """Its time of return counts from the end of the whole answer."""


class PrefillAnswer(msgspec.Struct, forbid_unknown_fields=True):
    token: int
    """The first output token."""
    cached_tokens: int
    """Cache hits of the prompt at the prefill server."""


class PrefillLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of the answer. An empty line is a heartbeat; the last line has the answer or an error."""

    answer: PrefillAnswer | None = None
    error: str | None = None


def proof(secret: bytes, purpose: str, content: bytes) -> str:
    """For `PROOF_HEADER`."""
    return hmac.new(secret, purpose.encode() + b"|" + content, hashlib.sha256).hexdigest()


def proves(secret: bytes, purpose: str, content: bytes, given: str) -> bool:
    """True: the sender of `given` knows the secret. Compares in constant time."""
    return hmac.compare_digest(proof(secret, purpose, content).encode(), given.encode())
