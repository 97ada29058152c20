"""What the clients of a replayed trace tell the cache: names of sessions, and times of return, right or wrong."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

from ...contract.sessions import LAST_TURN, MAX_RETURN_S
from .driver import ReplayOptions
from .trace import TraceRequest

MOST_FOLLOWERS = 3
"""Different ids behind an id of one session: its turns, and turns that were asked again. Shared prefixes have more."""

LIE_S = 1.0


def as_told(requests: Sequence[TraceRequest], options: ReplayOptions) -> Sequence[TraceRequest]:
    """`requests` with the sessions and times of return that `options.told` names. Times count from the end of a
    request, which an open loop takes for its timestamp.
    """
    if options.told == "trace":
        return requests
    if options.told == "unnamed":
        return [replace(request, session=None, return_in_s=None) for request in requests]
    named: list[str | None] = [request.session for request in requests]
    names = named if any(named) else inferred(requests)
    dice = random.Random(0)
    told: list[TraceRequest] = []
    following: dict[str, TraceRequest] = {}
    for request, name in zip(reversed(requests), reversed(names), strict=True):
        after = None if name is None else following.get(name)
        return_in_s = _told(options, dice, None if after is None else options.delay_ms(request, after) / 1000)
        told.append(replace(request, session=name, return_in_s=return_in_s))
        if name is not None:
            following[name] = request
    return told[::-1]


def _told(options: ReplayOptions, dice: random.Random, delay_s: float | None) -> float | None:
    """What a client tells whose session returns after `delay_s`, or never."""
    if options.told == "none":
        return None
    if options.told == "lies":
        return LIE_S if delay_s is None else LAST_TURN
    if delay_s is None:
        return LAST_TURN
    if options.told == "last":
        return None
    return min(MAX_RETURN_S, delay_s * options.told_error ** dice.choice((-1, 1)))


def inferred(requests: Sequence[TraceRequest]) -> list[str]:
    """A session per request of a trace that names none: that of the last prompt with the deepest common id. Ids of
    prefixes that sessions share do not count.
    """
    followers: dict[int, set[int]] = defaultdict(set)
    prompts = [request.hash_ids[: request.num_full_ids] for request in requests]
    for ids in prompts:
        for before, after in pairwise(ids):
            followers[before].add(after)
    owners: dict[int, str] = {}
    names = []
    for request, ids in zip(requests, prompts, strict=True):
        shared = (depth for depth, each in enumerate(ids, 1) if len(followers[each]) > MOST_FOLLOWERS)
        own = ids[max(shared, default=0) :]
        name = next((owners[each] for each in reversed(own) if each in owners), f"line {request.line}")
        owners.update(dict.fromkeys(own, name))
        names.append(name)
    return names
