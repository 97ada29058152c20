"""A process that a test asks, stops and kills: a Mooncake plane, or one end of a `Presence`."""

from __future__ import annotations

import multiprocessing
import os
import signal
from typing import Any

from fastdeploy_kvcache_v1.transfer.mooncake_plane import MooncakePlane
from fastdeploy_kvcache_v1.transfer.presence import Presence
from tests.gpu.plane_contract import Tensors, content
from tests.transfer.planes import HOST, Theirs


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


def serve_mooncake(connection, seed):
    """Answers with its address until the other end is gone."""
    theirs = Theirs(MooncakePlane(HOST), Tensors(content(seed)))
    while True:
        connection.send(theirs.address)
        try:
            connection.recv()
        except EOFError:
            os._exit(0)


def own(connection, directory):
    """An owner, until it is killed."""
    presence = Presence(directory)
    connection.send(presence.path)
    connection.recv()
