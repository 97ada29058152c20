"""The cache managers of prefill and decode servers inside a real FastDeploy."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import Any

from ...metric_table import Source
from ...transfer.rank_messages import TransferCommand
from ..copy_report import socket_path
from ..engine.copy_reports import make_private
from ..engine.patches import EnginePrefixCache
from . import settings
from .decode_adapter import DecodeAdapter
from .grants import Grants
from .place import place_of
from .prefill_adapter import PrefillAdapter
from .rank_channel import EngineEnd, LeaseCounts, RankNews

ASK_UNTIL_GRANTED = "PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES"
"""FastDeploy's own: whether it asks a decode server for room for ever, or gives the request up at the first failure."""

WAIT_FOR_ANSWER = "FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS"
"""FastDeploy's own, 30 by default. It has one thread that asks (three in 2.6): others wait behind it."""

FETCH_S = 600.0
"""A fetch may take so long as a whole; one without news ends much sooner, by the worker's own limit."""


class NoFollowers:
    """Stands for `Followers`: requests do not wait in FastDeploy's queue here, but for a decode server."""

    def passes_over(self, manager: Any, request: Any) -> bool:
        return False

    def put_back(self, manager: Any) -> None:
        """Nothing was passed over."""


class RoleCache(EnginePrefixCache):
    """What both roles have: a place that peers know, and a way to their ranks."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        settings.export(place_of(config))
        self._ranks: EngineEnd | None = None

    def launch_cache_manager(
        self,
        cache_config: Any,
        tensor_parallel_size: int,
        device_ids: Any,
        pod_ip: str,
        engine_worker_queue_port: int,
        ipc_suffix: Any,
        create_cache_tensor: bool,
    ) -> list[Any]:
        """Opens the way to the ranks, before they start. Raises `ConfigError`."""
        if self._ranks is None:
            directory = socket_path(int(engine_worker_queue_port)).parent
            make_private(directory)
            self._ranks = EngineEnd(int(engine_worker_queue_port), tensor_parallel_size)
            Finalize(None, self._ranks.close, exitpriority=1)
            Finalize(None, shutil.rmtree, (directory,), {"ignore_errors": True}, exitpriority=0)
        return super().launch_cache_manager(
            cache_config,
            tensor_parallel_size,
            device_ids,
            pod_ip,
            engine_worker_queue_port,
            ipc_suffix,
            create_cache_tensor,
        )


class PrefillCache(PrefillAdapter, RoleCache):
    """Of a prefill server."""

    def __init__(self, config: Any) -> None:
        choice = settings.transfer_choice()
        super().__init__(config)
        os.environ.setdefault(WAIT_FOR_ANSWER, str(math.ceil(choice.settings.silence_s)))
        os.environ[ASK_UNTIL_GRANTED] = "0"  # `ask_for_room` asks again, and comes to an end
        self.followers = NoFollowers()  # type: ignore[assignment]
        self.leases = LeaseCounts()
        """Those of rank 0: all ranks have the same requests."""
        self.publisher.role = "prefill", {Source.TRANSFERS: self.leases}

    def take_reports(self) -> None:
        super().take_reports()
        for rank, counts in self._ranks.take() if self._ranks is not None else ():
            if rank == 0 and isinstance(counts, LeaseCounts):
                self.leases.num_open, self.leases.totals = counts.num_open, counts.totals


class DecodeCache(DecodeAdapter, RoleCache):
    """Of a decode server."""

    def __init__(self, config: Any) -> None:
        choice = settings.transfer_choice()
        super().__init__(config)
        self.grants = Grants(
            num_ranks=int(config.parallel_config.tensor_parallel_size),
            send=self._tell_ranks,
            give_back=self.give_back,
            fetch_s=FETCH_S,
            token_s=choice.settings.wait_s,
        )
        self.publisher.role = "decode", {Source.TRANSFERS: self.grants.ledger, Source.GRANTS: self.grants}

    def take_reports(self) -> None:
        """The first thing that a scheduling step does."""
        self.schedule_begins()
        super().take_reports()

    def _rank_news(self) -> Sequence[RankNews]:
        return self._ranks.take() if self._ranks is not None else ()

    def _tell_ranks(self, command: TransferCommand) -> Sequence[int]:
        assert self._ranks is not None, "FastDeploy launches its cache service before it serves"
        return self._ranks.send(command)
