"""Lane: a thread that does one kind of work on the store, in order, with a connection of its own."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from ...errors import KVCacheError
from ..messages import UseNamespace
from ..namespace import Namespace

__all__ = ["Connection", "Lane"]

logger = logging.getLogger(__name__)


class Connection(Protocol):
    """What a lane needs to know of its connection to the store."""

    def close(self) -> None:
        """Give everything back. Idempotent."""


class Lane:
    """Every command is answered, whatever happens; the thread lives as long as the lane."""

    def __init__(
        self,
        name: str,
        *,
        open_backend: Callable[[Namespace], Connection],
        work: Callable[[Any, Any], Any],
        on_error: Callable[[Any, str], Any],
        answer: Callable[[Any], None],
        niceness: int = 0,
    ) -> None:
        """`work` answers a command, given what `open_backend` returned, and `on_error` one whose work raised. `answer`
        takes the answer, on the thread of the lane. Starts at once.
        """
        self.name = name
        self._open_backend = open_backend
        self._work = work
        self._on_error = on_error
        self._answer = answer
        self._niceness = niceness
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._namespace: Namespace | None = None
        self._backend: Connection | None = None
        self._busy = threading.Lock()
        """Held while a command is worked on."""
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, command: Any) -> None:
        """A `UseNamespace`, or what `work` knows. Never blocks."""
        self._commands.put(command)

    def settle(self, deadline: float | None = None) -> bool:
        """True if the command that was begun before this call has ended by `deadline` (`time.monotonic`; None: waits
        for it).
        """
        is_free = self._busy.acquire(timeout=-1 if deadline is None else max(0.0, deadline - time.monotonic()))
        if is_free:
            self._busy.release()
        return is_free

    def close(self, deadline: float) -> bool:
        """Drops what was not begun; True if the thread ended by `deadline` (`time.monotonic`)."""
        self._stop = True
        self._commands.put(None)
        self._thread.join(max(0.0, deadline - time.monotonic()))
        return not self._thread.is_alive()

    def _run(self) -> None:
        if self._niceness:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)  # on Linux, of a thread
        while (command := self._commands.get()) is not None and not self._stop:
            if isinstance(command, UseNamespace):
                self._disconnect()
                self._namespace = command.namespace
            else:
                with self._busy:
                    answer = self._answer_to(command)
                self._answer(answer)
        self._disconnect()

    def _answer_to(self, command: Any) -> Any:
        try:
            return self._work(self._connected(), command)
        except Exception as error:  # the edge of the thread: this unit of work fails
            if not isinstance(error, KVCacheError):
                logger.exception("%s failed", self.name)
            return self._on_error(command, str(error) if isinstance(error, KVCacheError) else repr(error))

    def _connected(self) -> Connection:
        if self._backend is None:
            assert self._namespace is not None, "the engine names the namespace first"
            self._backend = self._open_backend(self._namespace)
        return self._backend

    def _disconnect(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            try:
                backend.close()
            except Exception:  # the edge of the thread, and a foreign library
                logger.exception("%s could not close its connection", self.name)
