"""What FastDeploy's engine asks of a worker, one task at a time."""

from __future__ import annotations

from enum import IntEnum


class TaskKind(IntEnum):
    """Names and values of FastDeploy's `RequestType`."""

    PREFILL = 0
    DECODE = 1
    PREEMPTED = 2
    EXTEND = 3
    ABORT = 4
