"""Clients: they send prompts with shared prefixes, and expect the right tokens and exactly one end."""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Any

from fastdeploy_kvcache_v1.contract.sessions import LAST_TURN, SessionHint, session_hint

from .chance import pick
from .memory import Prefix, Tags, WrongError

SESSIONS = ("s0", "s1", "s2", "s3", "s4")
RETURNS = (LAST_TURN, 0.0, 0.2, 1.0, 5.0, 1e6)
"""Seconds that clients tell, most of them wrong."""


class Request:
    def __init__(self, uid: int, request_id: str, prompt: list[int], max_tokens: int) -> None:
        self.uid, self.request_id, self.prompt, self.max_tokens = uid, request_id, prompt, max_tokens
        self.salt: str | None = None
        self.reads = self.writes = True
        self.session: str | None = None
        self.return_in_s: float | None = None
        self.image: tuple[int, int, str] | None = None
        """Offset, length, content."""
        self.output: list[int] = []

    @property
    def hint(self) -> SessionHint:
        return session_hint(self.session, (self.salt or "").encode(), self.return_in_s)

    def tokens(self) -> list[Hashable]:
        """Return the prompt, with an image's content in place of its placeholder tokens."""
        if self.image is None:
            return list(self.prompt)
        first, length, content = self.image
        inside = range(first, first + length)
        return [f"{content}.{at - first}" if at in inside else token for at, token in enumerate(self.prompt)]


class Clients:
    def __init__(self, world: Any, *, block_size: int, most: int = 12, images: bool = False, kinds: int = 3) -> None:
        self.world, self.block_size, self.most, self.images = world, block_size, most, images
        self.kinds = kinds
        """Number of different system prompts."""
        self.requests: dict[int, Request] = {}
        """Open requests by `uid`."""
        self.ids: list[str] = []
        self.aborted: set[str] = set()
        """Ids, because FastDeploy aborts by id and remembers an id without a request."""
        self.finished: list[list[int]] = []
        self.computed: list[list[int]] = []
        """Prompts and outputs that were computed, without those with a salt or an image."""
        self.num_ended: dict[str, int] = {}
        self.num_tokens = 0

    # ---- events

    def add(self, rng: random.Random) -> None:
        request = self._request(rng)
        self._add(request)
        for _ in range(rng.randrange(1, 4) if rng.random() < 0.2 and request.image is None else 0):
            branch = Request(len(self.ids), f"r{len(self.ids)}", self._branch(request.prompt, rng), rng.randrange(1, 4))
            branch.salt = request.salt
            self._add(branch)
        self.tell(self.world.source(f"told {len(self.ids)}"))

    def tell(self, rng: random.Random) -> None:
        """Tell when a session returns, at any time: while it runs, after its end, after the server has forgotten it."""
        if rng.random() < 0.4:
            self.world.host.tell(session_hint(rng.choice(SESSIONS), rng.choice([b"", b"", b"a"]), rng.choice(RETURNS)))

    def _add(self, request: Request) -> None:
        if len(self.requests) < self.most:
            self.requests[request.uid] = request
            self.ids.append(request.request_id)
            self._name_session(request, self.world.source(f"session {request.uid}"))
            size = f"prompt of {len(request.prompt)} tokens, {request.max_tokens} to generate"
            self.world.log("add", f"{request.request_id}:", size)
            self.world.host.add(request)

    def abort(self, rng: random.Random) -> None:
        request = pick(self.requests.values(), rng.random())
        if request is not None:
            self.aborted.add(request.request_id)
            self.world.log("abort", request.request_id)
            self.world.host.abort(request.request_id)

    def _request(self, rng: random.Random) -> Request:
        request = Request(len(self.ids), f"r{len(self.ids)}", self._prompt(rng), rng.randrange(1, 13))
        lot = rng.random()
        old = int(rng.random() * 10)
        if lot < 0.1 and self.ids:
            request.request_id = self.ids[-1 - old % len(self.ids)]
        lot = rng.random()
        if lot < 0.1:
            request.salt = "ab"[int(lot * 100) % 2]
        elif lot < 0.15:
            request.reads = False
        elif lot < 0.2:
            request.writes = False
        lot, offset, length = rng.random(), rng.random(), rng.randrange(1, 3 * self.block_size)
        if self.images and lot < 0.2 and len(request.prompt) > length + 1:
            first = int(offset * (len(request.prompt) - length - 1))
            request.image = first, length, f"image{int(lot * 15)}"
            request.prompt[first : first + length] = [1] * length
        return request

    def _name_session(self, request: Request, rng: random.Random) -> None:
        """Some prompts with one beginning have one name, others a wrong one. Changes no draw of other sources."""
        lot, wrong = rng.random(), rng.choice(SESSIONS)
        if lot < 0.6:
            request.session = wrong if lot < 0.2 else SESSIONS[sum(request.prompt[: self.block_size]) % len(SESSIONS)]
        if rng.random() < 0.5:
            request.return_in_s = rng.choice(RETURNS)

    def _prompt(self, rng: random.Random) -> list[int]:
        lot, cut, old = rng.random(), rng.random(), rng.random()
        tail = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 2 * self.block_size))]
        if lot < 0.5 and self.finished:
            base = pick(self.finished, old)[: 6 * self.block_size]
        else:
            base = [int(old * self.kinds) + 1] * (6 * self.block_size)
        return base[: int(1.2 * cut * len(base))] + tail  # often all of it: the next turn of a conversation

    def _branch(self, prompt: list[int], rng: random.Random) -> list[int]:
        """Return another tail of the same prefix: one step then computes, and copies, several tails of a prefix."""
        num_shared = min(rng.choice([1, 2, 4, 8]), len(prompt) // self.block_size) * self.block_size
        return prompt[:num_shared] + [rng.randrange(1, 9) for _ in range(2 * self.block_size)]

    # ---- called by the host

    def token(self, uid: int, token: int, root: Hashable, tags: Tags) -> None:
        request = self._live(uid, "a token")
        prefix = Prefix(tags, root)
        prefix.extend([*request.tokens(), *request.output])
        if token != prefix.next_token:
            raise WrongError(f"{request.request_id} gets token {token}, not {prefix.next_token}")
        self.num_tokens += 1
        request.output.append(token)
        if len(request.output) > request.max_tokens:
            raise WrongError(f"{request.request_id} gets more tokens than max_tokens")

    def ended(self, uid: int, how: str) -> None:
        request = self._live(uid, how)
        if how == "finished" and len(request.output) != request.max_tokens:
            raise WrongError(f"{request.request_id} is finished after {len(request.output)} of {request.max_tokens}")
        if how == "aborted" and request.request_id not in self.aborted:
            raise WrongError(f"{request.request_id} is aborted without an abort of its client")
        self.num_ended[how] = self.num_ended.get(how, 0) + 1
        del self.requests[uid]
        if request.image is None and request.salt is None:
            self.computed.append([*request.prompt, *request.output])
        if request.image is None:
            self.finished = [*self.finished, [*request.prompt, *request.output]][-12:]
        self.world.log("end", request.request_id, how)

    def _live(self, uid: int, what: str) -> Request:
        if uid not in self.requests:
            raise WrongError(f"request {uid} gets {what} after its end")
        return self.requests[uid]
