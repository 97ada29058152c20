"""ReuseHistory: learns from past requests when sessions and shared blocks come back, and so what keeping them is worth.

It watches requests, not the cache, so evictions do not change what it learns. A prompt of n blocks costs O(log n).
Memory is bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ...contract.messages import BlockHashes
from ...contract.sessions import LAST_TURN, SessionHint
from ..cache_stats import Counters
from ..run import Run
from .ages import LiveAges
from .claims import Claims
from .judge import Judge
from .rates import AGE_CLASSES, ReuseRates, worthless
from .sessions import NEVER, Session, SessionTable
from .watched import IN_USE, Group, WatchedBlocks, last_watched

TICKS_PER_SECOND = 1024

REQUESTS_PER_REFRESH = 64
REFRESHES_PER_LESSON = 4
EARLY = (1, 2, 3)
"""Refreshes after which worths are computed too."""

SOONEST = TICKS_PER_SECOND // 4
"""Told times that are closer count as equal."""

MOST_USES = 8
USE_CLASSES = tuple(uses.bit_length() for uses in range(MOST_USES + 1))
"""Class of shared blocks by the number of their uses since they were computed: 0, 1, 2 or 3, 4 to 7, more."""
LEFT = USE_CLASSES[-1] + 1
"""Class of a session whose blocks another prompt has left behind: a fork of it, or its client's next prompt."""
ENDED = LEFT + 1
"""Class of a session that sends no more requests, as its client told."""
TOOL_CALL = ENDED + 1
"""Class of a session whose last answer ended in a tool call: its next prompt brings the result."""
FIRST_TURN = TOOL_CALL + 1
MOST_TURNS = 6
NUM_CLASSES = FIRST_TURN + MOST_TURNS
SESSIONS = 1
"""Second kind of classes in `ReuseRates`, from `LEFT` on; the first one is that of shared blocks."""
ALL_BLOCKS = NUM_CLASSES
"""Column of `LiveAges` for blocks of all classes."""

DOUBT = 0.1
"""Weight of the prior, in sessions or average requests: every class starts with the common rate, at each age."""


Stretch = tuple[int, int]
"""Consecutive shared blocks of a prompt that have one class: the depth of the last one in blocks from the start of the
prompt, and the class. It begins where the next stretch above ends. A plain tuple, because each request makes several.
"""


class Visit(NamedTuple):
    """An admitted request."""

    session: Session
    groups: Sequence[Group]
    left: Session | None
    """The session that it left behind, or whose end it rewrites: to be queued anew."""


class ReuseHistory:
    """Learns from requests. `clock` returns seconds; the history counts ticks.

    `most_watched` returns how many blocks may be watched; `num_evictable` returns how many blocks not in use the cache
    can hold. Both are called again, because the size of the cache may change.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        counters: Counters,
        most_watched: Callable[[], int],
        num_evictable: Callable[[], int],
        block_size: int,
    ) -> None:
        self._clock = clock
        self._counters = counters
        self._most_watched = most_watched
        self._num_evictable = num_evictable
        self.now = self._refreshed_at = self._ticks()
        self._rates = ReuseRates(LEFT, NUM_CLASSES - LEFT)
        self._ages = LiveAges(NUM_CLASSES + 1, self.now)
        self.judge = Judge()
        self._num_requests = self._num_blocks_seen = 0
        self.lru_age = 0
        """Age up to which an LRU cache of this size would still hold a block."""
        self._watched = WatchedBlocks()
        self.sessions = SessionTable(block_size)
        self.claims = Claims(counters)
        self.ended_first = True
        """False: blocks of ended sessions are used again, by other sessions."""
        self._num_refreshes = 0
        self._learned = self.worths = self._equal = worthless(NUM_CLASSES)
        """By class, then by class of age. Equal for all while recency rules."""

    def __len__(self) -> int:
        """Number of watched blocks."""
        return len(self._watched)

    def _ticks(self) -> int:
        return int(self._clock() * TICKS_PER_SECOND)

    def worth(self, run: Run) -> float:
        """Return the value of keeping a block of `run` per unit of time. Equal for all while recency rules."""
        owner = run.owner
        if owner is not None and owner.due is not None and self.judge.trusts:
            return 1.0 / max(SOONEST, owner.due - self.now)
        age = self.now - run.last_use
        return self.worths[run.use_class][AGE_CLASSES[(age * age).bit_length()]]

    def arrived(self, sequence: BlockHashes, num_cached: int) -> Visit:
        """Record an admitted request, `num_cached` blocks of which were hit."""
        hashes = sequence.hashes
        now = self.now = self._ticks()
        self._num_requests += 1
        self._num_blocks_seen += len(hashes)
        held_since = now - self.lru_age
        known = found_by_lru = num_forked = 0
        groups, ages = self._watched.use(hashes, len(hashes)), self._ages
        session, left = self._session(sequence, groups)
        for group in groups:
            known, time, owner, num_blocks = group.depth, group.time, group.owner, group.num_blocks
            if time == IN_USE or time > held_since:
                found_by_lru = known
            if time != IN_USE:
                if owner is None:
                    self._rates.used_again(group.use_class, now - time, num_blocks)
                    ages.remove(time, num_blocks, ALL_BLOCKS, group.use_class)
                else:
                    ages.remove(time, num_blocks, ALL_BLOCKS)
                    num_forked += num_blocks * (owner is not session)
                group.time = IN_USE
            if owner is not session:
                group.owner = None
            if group.uses < MOST_USES:
                group.uses += 1
        self.judge.compare(known if known <= num_cached else last_watched(num_cached), found_by_lru)
        if left is not None and left.last_use != IN_USE:
            self._leave(left, num_forked)
        self._counters.named_session_requests += bool(sequence.session.name)
        if session.last_use != IN_USE:
            self._counters.continued_session_requests += 1
            self._returned(session, session.weight)
            self._check_claim(session)
            session.last_use = IN_USE
            if left is None and not session.is_on(hashes):
                session.use_class, left = LEFT, session  # of the end that this prompt rewrites
        if not self._num_requests % REQUESTS_PER_REFRESH:
            self._refresh()
        return Visit(session, groups, left)

    def _session(self, sequence: BlockHashes, groups: Sequence[Group]) -> tuple[Session, Session | None]:
        """Return the session that a request continues, and the one that it leaves behind."""
        hashes, hint = sequence.hashes, sequence.session
        name = hint.name
        left = named = self.sessions.named(name) if name else None
        if named is not None and (named.is_on(hashes) or named.has_stem(hashes)):
            return named, None
        session = self.sessions.continued(hashes, groups[-1].end if groups else 0)
        if (
            session is None
            or (name and session.name not in (b"", name))
            or not (session.is_on(hashes) or session.has_stem(hashes))
            or _have_several_used(groups, session.depth if session.is_on(hashes) else last_watched(session.stem_depth))
        ):
            owner = groups[-1].owner if groups else None
            if left is None and isinstance(owner, Session):
                left = owner
            session = Session(left.turns if left else 0, hint.tenant)
        if name:
            self.sessions.name(session, name)
        return session, left

    def tell(self, hint: SessionHint) -> tuple[Session | None, bool]:
        """Take note of a time of return that is told apart from a request. Returns the session, if it is known, and
        True if its blocks are to be queued anew: repeating a time does not make blocks younger.
        """
        session = self.sessions.named(hint.name)
        if session is None or hint.return_in_s is None:
            return session, False
        self.now, before = self._ticks(), (session.due, session.use_class)
        self._claim(session, hint.tenant, hint.return_in_s)
        if session.last_use != IN_USE:
            self._reclass(session, self._class(session))
        return session, before != (session.due, session.use_class)

    def _claim(self, session: Session, tenant: bytes, return_in_s: float) -> None:
        """Take note of a time of return, counted from now."""
        self._counters.told_returns += 1
        before, session.told, session.due = session.told, NEVER, None
        self.claims.count(tenant, (return_in_s == LAST_TURN) - (before == NEVER), 0)
        if return_in_s != LAST_TURN:
            session.told = self.now + int(return_in_s * TICKS_PER_SECOND)
            wait = session.told - (self.now if session.last_use == IN_USE else session.last_use)
            if before is None or before == NEVER:
                session.claimed = wait
            elif wait > 4 * (session.claimed + TICKS_PER_SECOND):  # put off again and again: the first time was wrong
                session.claimed = wait
                self.claims.count(tenant, 1, 1)
        session.is_believed = self.claims.believes(tenant)
        if session.told != NEVER and session.is_believed:
            session.due = session.told

    def _class(self, session: Session) -> int:
        if session.told == NEVER and session.is_believed:
            return ENDED
        if session.calls_tool:
            return TOOL_CALL
        turns = session.turns or 1
        return FIRST_TURN - 1 + (turns if turns < MOST_TURNS else MOST_TURNS)

    def _reclass(self, session: Session, use_class: int) -> None:
        self._ages.remove(session.last_use, session.weight, session.use_class)
        session.use_class = use_class
        self._ages.add(session.last_use, use_class, session.weight)

    def _check_claim(self, session: Session) -> None:
        """Compare the return of a session with what its client told: right within a factor of 4."""
        told, session.told, session.due = session.told, None, None
        if told == NEVER:
            self.claims.count(session.tenant, 0, 1)
        elif told is not None:
            claimed, gap = told - session.last_use, self.now - session.last_use
            is_wrong = not claimed - TICKS_PER_SECOND <= 4 * gap <= 16 * (claimed + TICKS_PER_SECOND)
            self.claims.count(session.tenant, 1, int(is_wrong))

    def is_overdue(self, session: Session) -> bool:
        """True if the told time has passed by three times its wait. It does not count any more then."""
        due = session.due
        if due is None or session.last_use == IN_USE:
            return False
        if self.now - session.last_use <= 4 * (due - session.last_use + TICKS_PER_SECOND):
            return False
        session.told = session.due = None
        self.claims.count(session.tenant, 1, 1)
        return True

    def _returned(self, session: Session, weight: float) -> None:
        self._rates.used_again(session.use_class, self.now - session.last_use, weight)
        self._ages.remove(session.last_use, weight, session.use_class)

    def _leave(self, session: Session, num_forked: int) -> None:
        """Count the blocks that another session took over as used again, and give the others their class."""
        used = session.weight * min(1.0, num_forked / max(1, session.num_blocks))
        self._returned(session, used)
        session.weight -= used
        session.num_blocks = max(0, session.num_blocks - num_forked)
        session.told = session.due = None
        self._reclass(session, LEFT)

    def ended(
        self, sequence: BlockHashes, num_cached: int, visit: Visit | None, num_prompt: int, *, resumes: bool = False
    ) -> tuple[Session, list[Stretch]]:
        """Record the end of a request: its first `num_cached` blocks, which are cached, count as used now. Returns
        its session, and the stretches of its shared blocks, the deepest first. `visit`: the result of `arrived`, if it
        was called. The prompt has `num_prompt` full blocks. `resumes`: it was preempted, so its session goes on.
        """
        hashes, hint = sequence.hashes, sequence.session
        now = self.now = self._ticks()
        if visit is not None:
            session, groups, _ = visit
        else:
            groups = self._watched.use(hashes, num_cached)
            session, _ = self._session(sequence, groups)
        groups = self._watched.use(hashes, num_cached, groups, session)
        ages, stretches, last_class, num_own = self._ages, [], -1, 0
        weights = ages.young(now)
        if session.last_use != IN_USE:  # another request of it has ended before
            ages.remove(session.last_use, session.weight, session.use_class)
        session.turns += not resumes
        session.last_use, session.weight = now, 1.0
        if hint.return_in_s is not None and not resumes:
            self._claim(session, hint.tenant, hint.return_in_s)
        session.calls_tool = hint.calls_tool
        session.use_class = self._class(session)
        self.sessions.ended(session, hashes, num_prompt if num_prompt < len(hashes) else len(hashes))
        weights[session.use_class] += 1.0
        if groups:
            weights[ALL_BLOCKS] += groups[-1].depth
        for group in reversed(groups):
            num_blocks, owner = group.num_blocks, group.owner
            if group.time != IN_USE:  # another request that used them has ended before
                if owner is None:
                    ages.remove(group.time, num_blocks, ALL_BLOCKS, group.use_class)
                else:
                    ages.remove(group.time, num_blocks, ALL_BLOCKS)
            group.time = now
            if owner is session:
                num_own += num_blocks
                continue
            group.owner = None
            use_class = group.use_class = USE_CLASSES[group.uses]
            weights[use_class] += num_blocks
            if use_class != last_class:
                stretches.append((group.depth, use_class))
                last_class = use_class
        session.num_blocks = num_own
        return session, stretches

    def forget(self) -> None:
        """Forget all watched blocks and sessions, because the cache was emptied. Learned rates stay."""
        self._watched.forget()
        self.sessions.forget()
        self._ages = LiveAges(NUM_CLASSES + 1, self.now)

    def _refresh(self) -> None:
        ticks, self._refreshed_at = self.now - self._refreshed_at, self.now
        for young, old, weights in self._ages.spans(self.now):
            self._rates.exposed((young + old) // 2, weights, ticks)
        self._counters.predicted_session_returns = sum(self._rates.predicted[LEFT:])
        self.lru_age = self._ages.age_of(self.now, ALL_BLOCKS, self._num_evictable())
        if self.lru_age < self.now:
            self.judge.refresh()
        if self._num_refreshes in EARLY or not self._num_refreshes % REFRESHES_PER_LESSON:
            self._learned = self._rates.learned(DOUBT * self._num_blocks_seen / self._num_requests, DOUBT)
            self.ended_first = self._rates.is_rare(ENDED, SESSIONS)
        self._num_refreshes += 1
        self._watched.make_room(self._most_watched())
        self.worths = self._learned if self.judge.trusts else self._equal
        self._rates.fade()


def _have_several_used(groups: Sequence[Group], depth: int) -> bool:
    return any(group.owner is None and group.depth >= depth for group in groups)
