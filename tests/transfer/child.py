"""A process that a test asks, stops and kills."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any


class ChildProcess:
    """Runs `target(connection, *arguments)`, which sends one message when it is ready, `hello`, and then an answer to
    each message that it receives.
    """

    def __init__(self, target, *arguments):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=target, args=(theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.hello: Any = self._answer(60)

    def ask(self, *message):
        self._connection.send(message)
        return self._answer(30)

    def _answer(self, seconds):
        assert self._connection.poll(seconds), "the process does not answer"
        return self._connection.recv()

    def stop(self):
        os.kill(self.process.pid, signal.SIGSTOP)

    def go_on(self):
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self):
        self.process.kill()
        self.process.join()
        self._connection.close()
