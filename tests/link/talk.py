"""A worker rank, or an engine, in a process of its own: `python -m tests.link.talk rank|engine PATH RANK WORD`.

A rank answers each `Ask` and tells at its start that it is there. An engine prints who connects and lives until its
standard input ends.
"""

import os
import sys
import threading
from pathlib import Path

import msgspec

from fastdeploy_kvcache_v1.link.engine import EngineLink
from fastdeploy_kvcache_v1.link.messages import Hello, Memory, MessageTypes
from fastdeploy_kvcache_v1.link.rank import RankLink


class Ask(msgspec.Struct, frozen=True):
    number: int
    data: bytes = b""


class Answer(msgspec.Struct, frozen=True):
    number: int
    data: bytes = b""


TYPES = MessageTypes(to_engine=(Answer,), to_rank=(Ask,))
SLOTS, SLOT_BYTES = 4, 4096


def rank(path, number, num_ranks, word):
    def answer(message):
        if message.data == b"die":
            os._exit(3)
        link.send(Answer(message.number, message.data))

    gone = threading.Event()
    link = RankLink(path, number, num_ranks, TYPES, word=word)
    memory = os.memfd_create("host tier")
    os.truncate(memory, SLOTS * SLOT_BYTES)
    os.pwrite(memory, b"of rank %d" % number, 0)
    link.send(Memory(0, SLOTS, SLOT_BYTES), memory)
    os.close(memory)
    link.listen({Ask: answer}, gone.set)
    gone.wait()
    link.close()


def engine(path, _number, num_ranks, word):
    def say(*words):
        print(*words, flush=True)

    link = EngineLink(path, num_ranks, TYPES, word=word)
    link.listen({Hello: lambda rank, message: say(rank, "Hello")}, lambda rank: say(rank, "gone"))
    say("listens")
    sys.stdin.read()
    link.close()


if __name__ == "__main__":
    role, path, number, num_ranks, word = sys.argv[1:]
    {"rank": rank, "engine": engine}[role](Path(path), int(number), int(num_ranks), word)
