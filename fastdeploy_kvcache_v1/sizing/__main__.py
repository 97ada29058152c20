"""The process that makes a plan: it reads a `Task` from standard input and writes a `Plan`."""

from __future__ import annotations

import os
import sys

import msgspec

from ..config import KVCacheConfig
from .planner import Task
from .plans import make_plan

LOWEST_PRIORITY = 19


def main() -> None:
    os.nice(LOWEST_PRIORITY)
    task = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Task)
    sys.stdout.buffer.write(msgspec.msgpack.encode(make_plan(task.traffic, KVCacheConfig(**task.config))))


if __name__ == "__main__":
    main()
