"""Lane: a thread that does one kind of work on the store, in order, with a connection of its own."""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from ...errors import KVCacheError
from ..messages import UseNamespace
from ..namespace import Namespace

__all__ = ["Lane"]

logger = logging.getLogger(__name__)


class Lane:
    """Every command is answered, whatever happens; the thread lives as long as the lane."""

    def __init__(
        self,
        name: str,
        *,
        connect: Callable[[Namespace], Any],
        work: Callable[[Any, Any], Any],
        on_error: Callable[[Any, str], Any],
        answer: Callable[[Any], None],
        niceness: int = 0,
    ) -> None:
        """`work` answers a command, given what `connect` returned; None: the answer comes by itself. `on_error` answers
        one whose work raised. `answer` takes the answer, on the thread of the lane. Starts at once.
        """
        self.name = name
        self._connect = connect
        self._work = work
        self._on_error = on_error
        self._answer = answer
        self._niceness = niceness
        self._commands: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._namespace: Namespace | None = None
        self._connection: Any = None
        self._busy = threading.Lock()
        """Held while a command is worked on."""
        self._stop = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def do(self, command: Any) -> None:
        """A `UseNamespace`, or what `work` knows. Never blocks."""
        self._commands.put(command)

    def settle(self, deadline: float) -> bool:
        """True if the command that was begun before this call has ended by `deadline` (`time.monotonic`)."""
        is_free = self._busy.acquire(timeout=max(0.0, deadline - time.monotonic()))
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
                self._namespace, self._connection = command.namespace, None
                continue
            with self._busy:
                answer = self._answer_to(command)
            if answer is not None:
                self._answer(answer)
        self._connection = None

    def _answer_to(self, command: Any) -> Any:
        try:
            if self._connection is None:
                assert self._namespace is not None, "the engine names the namespace first"
                self._connection = self._connect(self._namespace)
            return self._work(self._connection, command)
        except Exception as error:  # the edge of the thread: this unit of work fails
            if not isinstance(error, KVCacheError):
                logger.exception("%s failed", self.name)
            return self._on_error(command, str(error) if isinstance(error, KVCacheError) else repr(error))
