"""The way from an engine with a role to its worker ranks and back, over unix sockets of this user."""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from typing import NamedTuple

import zmq

from ...errors import ConfigError
from ...link.place import socket_path
from ...transfer.rank_messages import TransferCommand, TransferNews
from ...transfer.role_info import RankInfo
from ..settings import SESSION_VARIABLE
from .leases import LeaseNews

News = RankInfo | TransferNews | LeaseNews
"""What a rank is, once, when it has its caches; what ended at a decode rank; what became of a prefill rank's lease."""


class RankNews(NamedTuple):
    rank: int
    news: News


def _address(queue_port: int, rank: int | None = None) -> str:
    name = f"fetches-{os.environ[SESSION_VARIABLE]}" + ("" if rank is None else f"-{rank}")
    return f"ipc://{socket_path(queue_port, name)}"


class EngineEnd:
    """`send` and `take` never block. Not thread-safe."""

    def __init__(self, queue_port: int, num_ranks: int) -> None:
        """Raises `ConfigError`. The directory of the sockets exists."""
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._news = self._context.socket(zmq.PULL)
        self._commands = [self._context.socket(zmq.PUSH) for _ in range(num_ranks)]
        try:
            for socket in (self._news, *self._commands):
                socket.set(zmq.RCVHWM, 0)  # the number of seats bounds what is under way
                socket.set(zmq.SNDHWM, 0)
            self._news.bind(_address(queue_port))
            for rank, socket in enumerate(self._commands):
                socket.bind(_address(queue_port, rank))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"the sockets to the workers of queue {queue_port} cannot be made: {error}") from None

    def send(self, command: TransferCommand) -> list[int]:
        """To every rank. Returns those that are not there: they will not answer."""
        message = pickle.dumps(command, pickle.HIGHEST_PROTOCOL)
        absent = []
        for rank, socket in enumerate(self._commands):
            try:
                socket.send(message, zmq.NOBLOCK)
            except zmq.Again:
                absent.append(rank)
        return absent

    def take(self) -> list[RankNews]:
        """What ranks have said since the last call."""
        news: list[RankNews] = []
        while self._news.poll(0):
            news.append(pickle.loads(self._news.recv()))
        return news

    def close(self) -> None:
        """Idempotent."""
        self._context.destroy(linger=0)


class RankEnd:
    """`take` and `tell` never block. Not thread-safe."""

    def __init__(self, queue_port: int, rank: int) -> None:
        self._rank = rank
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._commands = self._context.socket(zmq.PULL)
        self._news = self._context.socket(zmq.PUSH)
        for socket in (self._commands, self._news):
            socket.set(zmq.RCVHWM, 0)
            socket.set(zmq.SNDHWM, 0)
            socket.set(zmq.LINGER, 0)
        self._commands.connect(_address(queue_port, rank))
        self._news.connect(_address(queue_port))

    def take(self) -> Sequence[TransferCommand]:
        """What the engine has said since the last call, in its order."""
        commands: list[TransferCommand] = []
        while self._commands.poll(0):
            commands.append(pickle.loads(self._commands.recv()))
        return commands

    def tell(self, news: News) -> None:
        self._news.send(pickle.dumps(RankNews(self._rank, news), pickle.HIGHEST_PROTOCOL), zmq.NOBLOCK)

    def close(self) -> None:
        """Idempotent."""
        self._context.destroy(linger=0)
