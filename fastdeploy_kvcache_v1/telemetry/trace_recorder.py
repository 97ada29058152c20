"""TraceRecorder: writes the requests of a server as a trace for `fastdeploy-kvcache replay`, without tokens or text.

Blocks and sessions are named by hashes under a random key, one per file, that is stored nowhere. A reader of the file
sees which prompts have a common beginning, but cannot test guesses of their text.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ConfigError
from .metrics import counter, source

logger = logging.getLogger(__name__)

VARIABLE = "FASTDEPLOY_KVCACHE_RECORD_TRACE"
"""Names the file to record into, inside FastDeploy."""

NAME_BYTES = 8
KEY_BYTES = 32

MOST_KEPT_BLOCKS = 1 << 18
"""Limit for requests whose lines are not written yet, about 20 MB. Requests that end above it are left out."""
MOST_KEPT_REQUESTS = 1 << 16
"""A second limit of the same kind."""

MOST_SESSIONS = 1 << 16
"""Number of sessions whose last turn is remembered."""

MOST_FILES = 1_000

NAMED_AT_ONCE = 64
"""Blocks hashed before other threads may run, about 0.1 ms."""

MOMENT_S = 1.0

CLOSE_TIMEOUT_S = 5.0


class Ticket(NamedTuple):
    number: int
    arrived_s: float


@dataclass(frozen=True)
class _Ended:
    """An ended request. With `hashes` None nothing is written."""

    ticket: Ticket
    ended_s: float
    hashes: Sequence[bytes] | None = None
    input_length: int = 0
    output_length: int = 0
    session: Any = None
    """A `SessionHint`."""


@source("trace recorder")
class TraceRecorder:
    """Thread-safe. Only the constructor raises. Other methods never block and at most copy a list: a thread writes.

    Lines are in the order of tickets, so lines of requests that end early wait for earlier requests. Above the limits,
    the oldest missing line is skipped. The first failed write, for example on a full disk, ends the recording with one
    warning; the file then ends with its last whole line.
    """

    num_lines: int = counter("Requests that the recorded trace has", "trace_lines")
    num_lost: int = counter("Requests that the recorded trace lacks: the disk was full or too slow", "trace_lost_lines")

    def __init__(self, path: Path, block_size: int, *, log: logging.Logger = logger) -> None:
        """Create `path`, readable by its owner only, or `path.1` and so on if it exists. Raises `ConfigError`."""
        self._descriptor, self.path = _new_file(path)
        self._block_size = block_size
        self._log = log
        self._key = secrets.token_bytes(KEY_BYTES)
        self._start_s = time.monotonic()
        self._numbers = count()
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._num_kept_blocks = 0
        """Number of blocks in the inbox and in `_kept`."""
        self._is_open = True
        self._thread: threading.Thread | None = None
        """Started at the first line, because a server may fork before it serves."""
        self.num_lines = self.num_lost = 0
        # Used by the thread only:
        self._kept: list[tuple[int, _Ended]] = []
        """Heap by ticket number."""
        self._next_number = 0
        self._num_bytes = 0
        self._sessions: OrderedDict[str, float] = OrderedDict()
        """End of the last turn of each session, by hashed name."""

    # ---- any thread

    def arrived(self, age_s: float = 0.0) -> Ticket:
        """Record a request that arrived `age_s` seconds ago. The caller must call `ended` or `left` for it."""
        return Ticket(next(self._numbers), time.monotonic() - age_s)

    def ended(self, ticket: Ticket, sequence: Any, num_prompt: int) -> None:
        """Record the end of a request, whose `BlockHashes` begin with `num_prompt` tokens of the prompt. The KV of the
        last output token was not computed. O(blocks).
        """
        num_outputs = sequence.num_tokens - num_prompt
        hashes = sequence.hashes[: (num_prompt + max(0, num_outputs - 1)) // self._block_size]
        item = _Ended(ticket, time.monotonic(), hashes, num_prompt, num_outputs, sequence.session)
        self._put(item, len(hashes))

    def left(self, ticket: Ticket) -> None:
        """Record that a request left before any of it was computed."""
        self._put(_Ended(ticket, time.monotonic()), 0)

    def close(self) -> None:
        """Write the requests that have ended. Idempotent. Waits at most `CLOSE_TIMEOUT_S`."""
        with self._lock:
            was_open, self._is_open = self._is_open, False
            thread = self._thread
            if was_open:
                self._inbox.put(None)
        if thread is not None:
            thread.join(CLOSE_TIMEOUT_S)
        elif was_open:
            os.close(self._descriptor)

    def _put(self, item: _Ended, num_blocks: int) -> None:
        with self._lock:
            has_room = (
                self._num_kept_blocks + num_blocks <= MOST_KEPT_BLOCKS and self._inbox.qsize() < MOST_KEPT_REQUESTS
            )
            if not self._is_open or not has_room:
                self.num_lost += item.hashes is not None
                return
            self._num_kept_blocks += num_blocks
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="trace recorder", daemon=True)
                self._thread.start()
            self._inbox.put(item)

    # ---- the thread

    def _run(self) -> None:
        try:
            while (item := self._inbox.get()) is not None:
                heapq.heappush(self._kept, (item.ticket.number, item))
                self._write_ready(keep_blocks=MOST_KEPT_BLOCKS // 2)
            self._write_ready(keep_blocks=-1)
        except OSError as error:
            self._stop(f"{error.strerror}: the trace {self.path} ends here, after {self.num_lines} requests")
        except Exception:  # the edge of the thread: a bug costs the trace only
            self._log.exception("the trace %s ends here", self.path)
            self._stop("a bug ended the recording, see the traceback above")
        finally:
            os.close(self._descriptor)

    def _write_ready(self, *, keep_blocks: int) -> None:
        """Write the lines whose turn it is, then the oldest ones until at most `keep_blocks` blocks are kept."""
        while self._kept:
            number, item = self._kept[0]
            is_its_turn = number <= self._next_number
            if not is_its_turn and self._num_kept_blocks <= keep_blocks and len(self._kept) < MOST_KEPT_REQUESTS // 2:
                return
            if item.hashes is not None:
                self._write(self._line(item, item.hashes))
                with self._lock:
                    self.num_lines += 1
                    self._num_kept_blocks -= len(item.hashes)
            heapq.heappop(self._kept)
            self._next_number = max(self._next_number, number + 1)

    def _line(self, item: _Ended, hashes: Sequence[bytes]) -> bytes:
        num_full = item.input_length // self._block_size
        names = list(self._names(hashes))
        prompt = names[:num_full]
        while len(prompt) * self._block_size < item.input_length:  # the partial block, and blocks without a hash
            prompt.append(int.from_bytes(secrets.token_bytes(NAME_BYTES), "big"))
        fields: dict[str, Any] = {
            "timestamp": max(0, round(1000 * (item.ticket.arrived_s - self._start_s))),
            "input_length": item.input_length,
            "output_length": item.output_length,
            "tokens_per_id": self._block_size,
            "hash_ids": prompt,
            **({"output_hash_ids": names[num_full:]} if len(names) > num_full else {}),
            **self._turn(item),
            **({} if item.session.return_in_s is None else {"return_in_s": item.session.return_in_s}),
            **({"tool_call": True} if item.session.calls_tool else {}),
        }
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    def _names(self, hashes: Sequence[bytes]) -> Iterator[int]:
        for index, block in enumerate(hashes, start=1):
            yield int.from_bytes(blake2b(block, digest_size=NAME_BYTES, key=self._key).digest(), "big")
            if index % NAMED_AT_ONCE == 0:
                time.sleep(0)  # releases the interpreter

    def _turn(self, item: _Ended) -> dict[str, object]:
        """Make the fields of a turn of a session. A turn that began before the previous one ended has none. `MOMENT_S`
        is tolerated: a client can have the answer before the server has ended the request.
        """
        if not item.session.name:
            return {}
        name = blake2b(item.session.name, digest_size=NAME_BYTES, key=self._key).hexdigest()
        before_s = self._sessions.get(name)
        if before_s is not None and before_s > item.ticket.arrived_s + MOMENT_S:
            return {}
        self._sessions[name] = item.ended_s
        self._sessions.move_to_end(name)
        if len(self._sessions) > MOST_SESSIONS:
            self._sessions.popitem(last=False)
        delay = {} if before_s is None else {"delay": max(0, round(1000 * (item.ticket.arrived_s - before_s)))}
        return {"session_id": name, **delay}

    def _write(self, line: bytes) -> None:
        """Write the whole line. Raises `OSError`."""
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(self._descriptor, rest) :]
        self._num_bytes += len(line)

    def _stop(self, reason: str) -> None:
        self._log.warning("%s", reason)
        with suppress(OSError):
            os.ftruncate(self._descriptor, self._num_bytes)
        with self._lock:
            self._is_open = False
            self.num_lost += sum(item.hashes is not None for _, item in self._kept)
            while not self._inbox.empty():
                item = self._inbox.get()
                self.num_lost += item is not None and item.hashes is not None
        self._kept.clear()


def _new_file(path: Path) -> tuple[int, Path]:
    for number in range(MOST_FILES):
        name = path if number == 0 else path.with_name(f"{path.name}.{number}")
        try:
            return os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600), name
        except FileExistsError:
            continue
        except OSError as error:
            raise ConfigError(f"cannot record a trace in {name}: {error.strerror}") from None
    raise ConfigError(f"cannot record a trace: {path} and {MOST_FILES - 1} numbered ones exist; remove some")
