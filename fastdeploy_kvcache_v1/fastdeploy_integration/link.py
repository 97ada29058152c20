"""The link of FastDeploy's engine and workers: where it is, and which messages pass."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..contract.messages import WorkerReport
from ..link.engine import EngineLink
from ..link.messages import MessageTypes
from ..link.place import socket_path
from ..link.rank import RankLink
from ..storage.attention_store import tasks
from ..switch import SESSION_VARIABLE
from ..transfer.offer_desk import LeaseEnd
from ..transfer.rank_messages import COMMANDS, TransferNews
from ..transfer.role_info import RankInfo
from .disaggregation.leases import LeaseOpened, LeaseWithdrawn

TYPES = MessageTypes(
    to_engine=(RankInfo, TransferNews, LeaseOpened, LeaseWithdrawn, LeaseEnd, *tasks.ANSWERS),
    to_rank=(*COMMANDS, *tasks.COMMANDS),
)


def engine_link(queue_port: int, num_ranks: int, log: logging.Logger) -> EngineLink:
    """Raises `ConfigError`."""
    return EngineLink(socket_path(queue_port), num_ranks, TYPES, word=_word(), log=log)


def rank_link(config: Any) -> RankLink:
    """Of the rank that an `FDConfig` describes."""
    ranks = config.parallel_config
    path = socket_path(int(ranks.local_engine_worker_queue_port))
    rank, num_ranks = int(ranks.tensor_parallel_rank), int(ranks.tensor_parallel_size)
    return RankLink(path, rank, num_ranks, TYPES, word=_word())


def _word() -> str:
    """Workers inherit it from their engine, and all of a server's engines from the process that starts them."""
    return os.environ.get(SESSION_VARIABLE, "")


class ReportSender:
    """Sends the reports of a rank that have news. Used by the thread that computes."""

    def __init__(self, send: Callable[[WorkerReport], None]) -> None:
        self._send = send
        self._ended_through = -1
        self._has_sent = False

    def __call__(self, report: WorkerReport) -> None:
        """Of copies only those that failed are sent. The first report goes as soon as the copy paths are known."""
        is_first = not self._has_sent and report.copies is not None and bool(report.copies.paths)
        has_ended = report.transfers or report.ended_through > self._ended_through
        if is_first or has_ended or report.passes is not None or report.prefills:
            self._ended_through = max(self._ended_through, report.ended_through)
            self._has_sent = True
            self._send(replace(report, transfers=tuple(each for each in report.transfers if not each.ok)))
