"""Misses: why the prompt tokens of admitted requests were not hits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from ...contract.cache_report import RequestMiss
from ...contract.messages import BlockHash, CacheLevel
from ...contract.misses import Miss, MissReason, StoredPrefix
from ...telemetry.metrics import histogram, part, source
from ..cache_stats import MissedTokens
from ..invariants import expect
from ..radix_tree import RadixTree
from ..request_state import RequestState
from .evicted_pieces import (
    CAUSES,
    EVICTED_DEVICE,
    EVICTED_HOST,
    FADED,
    RESET,
    EvictedPieces,
    blocks_short,
    cause_of,
    ends_on,
    length_of,
)

MOST_KEPT = 256
"""Requests whose miss is kept: the latest, up to twice as many."""
MOST_TOLD = 4096
"""Waiting requests of which the storage tier told something."""

NEVER_SEEN, NOT_SEEN_LATELY = MissReason.NEVER_SEEN.value, MissReason.NOT_SEEN_LATELY.value
IN_FLIGHT, PARTIAL_BLOCK = MissReason.IN_FLIGHT.value, MissReason.PARTIAL_BLOCK.value
EVICTED_STORAGE, SKIPPED_BY_REQUEST = MissReason.EVICTED_STORAGE.value, MissReason.SKIPPED_BY_REQUEST.value
TIERS = {EVICTED_DEVICE: CacheLevel.DEVICE, EVICTED_HOST: CacheLevel.HOST}

NOTHING_TOLD = StoredPrefix()

Segment = tuple[str, int, int]
"""Why consecutive blocks were missed, how many, and the piece that they left in or 0."""

Row = tuple[Any, ...]
"""Time, tenant and first missing block, then the fields of a `Miss`: most are never read."""
PLACE = 3
"""Where the `Miss` begins in a row."""
NAME_BYTES = 8


@source("cache misses")
class Misses:
    """Counts each token that was not a hit, with the reason of its block. Not thread-safe.

    After the first missing block the walk goes from piece to piece of what left the cache, so mixed reasons of one
    prompt are told apart.
    """

    tokens: MissedTokens = part(MissedTokens)
    observe_next_use: Callable[[float], None] = histogram(
        "Time from the eviction of a block to the next request that missed it, one per request",
        "evicted_to_next_use_seconds",
        buckets=(1.0, 5.0, 15.0, 60.0, 300.0, 900.0, 3600.0, 14400.0, 86400.0),
    )

    def __init__(self, block_size: int, pieces: EvictedPieces, tree: RadixTree, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.observe_next_use = lambda seconds: None
        self._block_size = block_size
        self.pieces = pieces
        self._tree = tree
        self.tokens = MissedTokens()
        self._counts: dict[str, int] = vars(self.tokens)
        self._by_cause = [reason.value for reason in CAUSES]
        self._computing: dict[BlockHash, RequestState] = {}
        """Admitted requests by the first block that they compute; the first one of each block."""
        self._young: dict[str, Row] = {}
        """The latest misses, by request."""
        self._old: dict[str, Row] = {}
        self._stored: dict[str, StoredPrefix] = {}
        """By request: told, and not counted yet."""

    def of(self, request_id: str) -> Miss | None:
        """Return the miss of a recent request, also of one that has ended."""
        row = self._young.get(request_id) or self._old.get(request_id)
        return None if row is None else _miss(row)

    def latest(self, most: int) -> list[RequestMiss]:
        """List the last `most` requests, the newest last."""
        kept, now = [*self._old.items(), *self._young.items()], self._clock()
        tenants: dict[bytes, int] = {b"": 0}
        listed = []
        for request_id, row in kept[-most:]:
            seconds, tenant, block = row[:PLACE]
            number = tenants.setdefault(tenant, len(tenants))
            name = blake2b(block, digest_size=NAME_BYTES).hexdigest() if block else ""
            listed.append(RequestMiss(request_id, now - seconds, number, name, _miss(row)))
        return listed

    def blame_reset(self, reason: MissReason) -> None:
        """Set the reason of blocks that a reset forgot, also before."""
        self._by_cause[RESET] = reason.value

    def tell_stored(self, request_id: str, stored: StoredPrefix) -> None:
        """Take note of what the storage tier knows of a request that is not counted yet."""
        self._stored[request_id] = stored
        if len(self._stored) > MOST_TOLD:
            del self._stored[next(iter(self._stored))]

    def count(self, request: RequestState) -> None:
        """Count the tokens of an admitted request that were not hits. O(pieces in which they left the cache)."""
        at, limit, block_size = request.num_cached, request.limit, self._block_size
        num_left = request.num_query_tokens - at * block_size
        stored = self._stored.pop(request.request_id, NOTHING_TOLD) if self._stored else NOTHING_TOLD
        if at < limit:
            reason, num_blocks, piece = self._first(request, at, stored)
            row: Row = (reason, at * block_size, num_left)
            if piece:
                row += self._past(reason, piece, request.num_left)
            at += num_blocks
            while at < limit:  # from piece to piece: reasons may differ
                self._counts[reason] += num_blocks * block_size
                num_left -= num_blocks * block_size
                back = num_blocks if at == stored.end else 0
                reason, num_blocks, _ = self._next(request, at, stored, back)
                at += num_blocks
        elif request.num_query_tokens:
            reason = PARTIAL_BLOCK
            row = reason, at * block_size, num_left
        else:
            reason = SKIPPED_BY_REQUEST
            row = reason, 0, request.sequence.num_tokens
        self._counts[reason] += num_left  # the tokens behind the last full block too
        if len(self._young) >= MOST_KEPT:
            self._young, self._old = {}, self._young
        block = request.sequence.hashes[request.num_cached] if request.num_cached < limit else b""
        self._young[request.request_id] = (self.pieces.now, request.sequence.session.tenant, block, *row)

    def _first(self, request: RequestState, at: int, stored: StoredPrefix) -> Segment:
        """Find out why the block at `at`, the one behind the hits, was missed."""
        leaf, hashes = request.leaf, request.sequence.hashes
        block = hashes[at]
        if block in self._computing:
            return IN_FLIGHT, _num_common(hashes, self._computing[block].sequence.hashes, at, request.limit), 0
        if block in leaf.children:  # by an open copy, or cached since the match
            run = leaf.children[block]
            return IN_FLIGHT, run.common_blocks(hashes, at, min(run.length, request.limit - at)), 0
        if request.writes and not leaf.detached:
            self._computing[block] = request
            request.computes = block
        return self._next(request, at, stored, leaf.end - leaf.start)

    def committed(self, request: RequestState) -> None:
        """Take note that a request, which computes a block, has cached blocks."""
        self.ended(request)
        hashes = request.sequence.hashes
        if request.num_cached < len(hashes) and hashes[request.num_cached] not in self._computing:
            request.computes = hashes[request.num_cached]
            self._computing[request.computes] = request

    def ended(self, request: RequestState) -> None:
        assert request.computes is not None
        del self._computing[request.computes]
        request.computes = None

    def _next(self, request: RequestState, at: int, stored: StoredPrefix, back: int) -> Segment:
        """Find out why the block at `at` was missed. A piece with it may have begun `back` blocks before."""
        hashes, limit = request.sequence.hashes, request.limit
        if at < stored.end and stored.reason is not None:
            return stored.reason.value, min(stored.end, limit) - at, 0
        piece = found = self.pieces.find(hashes[at])
        begin = at
        if piece <= 0 and back:
            begin -= back
            piece = self.pieces.find(hashes[begin])
            if piece > 0 and not _goes_on(piece, hashes, begin, at):
                piece = 0
        if piece > 0:
            cause = cause_of(piece)
            reason = stored.beyond.value if stored.beyond is not None and cause in TIERS else self._by_cause[cause]
            return reason, min(begin + length_of(piece), limit) - at, piece
        if self._tree.has_ruins and (num_fallen := self._tree.num_fallen(hashes, at, limit)):
            return self._by_cause[RESET], num_fallen, 0
        return NOT_SEEN_LATELY if found == FADED else NEVER_SEEN, limit - at, 0

    def _past(self, reason: str, piece: int, num_left: int) -> tuple[CacheLevel | None, float | None, int | None]:
        """Describe the eviction of the first missing block."""
        tier = TIERS.get(cause_of(piece))
        if tier is None:
            return None, None, None
        if reason == EVICTED_STORAGE:
            return CacheLevel.STORAGE, None, None
        seconds = self.pieces.seconds_since(piece)
        self.observe_next_use(seconds)
        return tier, seconds, blocks_short(piece, num_left)

    def check(self, num_missed: int) -> None:
        """Raise `InvariantError` unless the reasons add up to `num_missed` tokens."""
        counted = sum(self._counts.values())
        expect(counted == num_missed, f"misses: {num_missed} tokens were missed, {counted} have a reason")
        for block, request in self._computing.items():
            expect(request.computes == block, f"misses: {request.request_id} does not compute the block of its name")

    def check_none(self) -> None:
        expect(not self._computing, "misses: a request that ended computes a block")


def _miss(row: Row) -> Miss:
    return Miss(MissReason(row[PLACE]), *row[PLACE + 1 :])


def _goes_on(piece: int, hashes: Sequence[BlockHash], begin: int, at: int) -> bool:
    """True if `piece` had the blocks of `hashes` from `begin` on, those from `at` on included: another prompt has
    computed the first ones anew.
    """
    end = begin + length_of(piece)
    return at < end <= len(hashes) and ends_on(piece, hashes[end - 1])


def _num_common(mine: Sequence[BlockHash], theirs: Sequence[BlockHash], at: int, limit: int) -> int:
    """Count the equal blocks from `at` on, the first of which is equal. O(log limit)."""
    end = min(limit, len(theirs))
    return bisect_left(range(at + 1, end), True, key=lambda index: mine[index] != theirs[index]) + 1
