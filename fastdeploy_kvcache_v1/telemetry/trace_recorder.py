"""TraceRecorder: writes what a server is asked as a trace that `fastdeploy-kvcache replay` reads. No token, no text.

A block is named by its hash under a key that is drawn for the file and kept nowhere: who has the file sees which
prompts begin alike, and cannot try out what they say. Names of users are hidden likewise.
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
"""The file to record into, inside FastDeploy."""

NAME_BYTES = 8
KEY_BYTES = 32

MOST_KEPT_BLOCKS = 1 << 18
"""Of requests whose lines are not written yet, some 20 MB; what ends beyond them is left out."""

MOST_KEPT_REQUESTS = 1 << 16
"""Likewise."""

MOST_SESSIONS = 1 << 16
"""Whose last turn is remembered."""

MOST_FILES = 1_000

NAMED_AT_ONCE = 64
"""Blocks, some 0.1 ms: then a thread that computes steps may go on."""

MOMENT_S = 1.0

CLOSE_TIMEOUT_S = 5.0


class Ticket(NamedTuple):
    """A request that has arrived."""

    number: int
    arrived_s: float


@dataclass(frozen=True)
class _Ended:
    """`hashes` None: there is nothing to write."""

    ticket: Ticket
    ended_s: float
    hashes: Sequence[bytes] | None = None
    input_length: int = 0
    output_length: int = 0
    session: str | None = None


@source("trace recorder")
class TraceRecorder:
    """Thread-safe. No method but the constructor raises, blocks, or does more than copy a list: a thread writes.

    Lines stand in the order of the tickets, so the lines of requests that ended early are kept until those before them
    have ended; when that is too much, the oldest is not waited for. The first write that fails, on a full disk for
    example, ends the recording with one line in the log; the file then ends with its last whole line.
    """

    num_lines: int = counter("Requests that the recorded trace has", "trace_lines")
    num_lost: int = counter("Requests that the recorded trace lacks: the disk was full or too slow", "trace_lost_lines")

    def __init__(self, path: Path, block_size: int, *, log: logging.Logger = logger) -> None:
        """Makes `path`, readable by its owner only; where it exists, `path.1` and so on. Raises `ConfigError`."""
        self._descriptor, self.path = _new_file(path)
        self._block_size = block_size
        self._log = log
        self._key = secrets.token_bytes(KEY_BYTES)
        self._start_s = time.monotonic()
        self._numbers = count()
        self._lock = threading.Lock()
        self._inbox: queue.SimpleQueue[_Ended | None] = queue.SimpleQueue()
        self._num_kept_blocks = 0
        """In the inbox and in `_kept`."""
        self._is_open = True
        self._thread: threading.Thread | None = None
        """Started when it has something to do: a server may fork before it serves."""
        self.num_lines = self.num_lost = 0
        # The thread's own:
        self._kept: list[tuple[int, _Ended]] = []
        """Heap by number."""
        self._next_number = 0
        self._num_bytes = 0
        self._sessions: OrderedDict[str, float] = OrderedDict()
        """When the last turn of each ended, by hidden name."""

    # ---- any thread

    def arrived(self, age_s: float = 0.0) -> Ticket:
        """A request has come, `age_s` seconds ago. `ended` or `left` must follow."""
        return Ticket(next(self._numbers), time.monotonic() - age_s)

    def ended(
        self,
        ticket: Ticket,
        hashes: Sequence[bytes],
        input_length: int,
        output_length: int,
        session: str | None = None,
    ) -> None:
        """The request computed its prompt, and all outputs but the last. `hashes`: of its full blocks, the output's
        too, which may grow meanwhile. O(blocks).
        """
        num_blocks = (input_length + max(0, output_length - 1)) // self._block_size
        known = hashes[:num_blocks]
        self._put(_Ended(ticket, time.monotonic(), known, input_length, output_length, session), len(known))

    def left(self, ticket: Ticket) -> None:
        """The request has gone before anything of it was computed."""
        self._put(_Ended(ticket, time.monotonic()), 0)

    def close(self) -> None:
        """Write what has ended. Idempotent; a disk that hangs is not waited for."""
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
        except Exception:  # the edge of the thread: a bug costs the trace, and nothing else
            self._log.exception("the trace %s ends here", self.path)
            self._stop("a bug ended the recording, see above")
        finally:
            os.close(self._descriptor)

    def _write_ready(self, *, keep_blocks: int) -> None:
        """Write what it is the turn of, and more from the oldest on while more than `keep_blocks` blocks are kept."""
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
        while len(prompt) * self._block_size < item.input_length:  # the last block, and what could not be hashed
            prompt.append(int.from_bytes(secrets.token_bytes(NAME_BYTES), "big"))
        fields: dict[str, Any] = {
            "timestamp": max(0, round(1000 * (item.ticket.arrived_s - self._start_s))),
            "input_length": item.input_length,
            "output_length": item.output_length,
            "tokens_per_id": self._block_size,
            "hash_ids": prompt,
            **({"output_hash_ids": names[num_full:]} if len(names) > num_full else {}),
            **self._turn(item),
        }
        return json.dumps(fields, separators=(",", ":")).encode() + b"\n"

    def _names(self, hashes: Sequence[bytes]) -> Iterator[int]:
        for index, block in enumerate(hashes, start=1):
            yield int.from_bytes(blake2b(block, digest_size=NAME_BYTES, key=self._key).digest(), "big")
            if index % NAMED_AT_ONCE == 0:
                time.sleep(0)  # lets go of the interpreter

    def _turn(self, item: _Ended) -> dict[str, object]:
        """Fields of a turn of a session. One that began before the end of the turn before follows nothing, unless it
        was only a moment: a client may have the answer before the server is done with the request.
        """
        if item.session is None:
            return {}
        digest = blake2b(item.session.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES, key=self._key)
        name = digest.hexdigest()
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
        """Whole, or raise `OSError`."""
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
    raise ConfigError(f"cannot record a trace in {path}: it exists, and so do {MOST_FILES - 1} more: remove some")
