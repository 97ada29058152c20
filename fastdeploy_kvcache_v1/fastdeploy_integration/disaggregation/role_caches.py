"""The cache managers of prefill and decode servers inside a real FastDeploy."""

from __future__ import annotations

import logging
import math
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from ...errors import CacheStateError, ConfigError, ModelError
from ...storage.model_digest import model_digest
from ...transfer.offer_desk import LeaseEnd
from ...transfer.rank_messages import TransferCommand, TransferNews
from ...transfer.role_info import RankInfo, RoleInfo
from ..engine.patches import EnginePrefixCache
from ..engine.storage import EngineStorage
from ..settings import log_directory
from . import settings
from .decode_adapter import DecodeAdapter
from .grants import Grants
from .leases import LeaseOpened, Leases, LeaseWithdrawn, RankNews
from .pausing import PREFILL_PAUSED, Gate
from .prefill_adapter import PrefillAdapter

logger = logging.getLogger(__name__)

ASK_UNTIL_GRANTED = "PREFILL_CONTINUOUS_REQUEST_DECODE_RESOURCES"
"""FastDeploy's own: whether it asks a decode server for room for ever, or gives the request up at the first failure."""

WAIT_FOR_ANSWER = "FD_PREFILL_WAIT_DECODE_RESOURCE_SECONDS"
"""FastDeploy's own, 30 by default. It has one thread that asks (three in 2.6): others wait behind it."""

INFO_FILE = "kvcache_role.json"
"""What `doctor` wants to know of all ranks, in the directory of the logs."""

FETCH_S = 600.0
"""A fetch may take so long as a whole; one without news ends much sooner, by the worker's own limit."""


def place_of(config: Any) -> settings.RankPlace:
    """Of an `FDConfig`. Reads all weights: blocks of another fine-tuning have the same shape. Raises `ConfigError`."""
    ports = config.cache_config.local_rdma_comm_ports or ()
    try:
        model = model_digest(Path(config.model_config.model))
    except ModelError as error:
        raise ConfigError(f"prefill and decode servers compare models, and this one failed: {error}") from None
    return settings.RankPlace(
        config.host_ip, tuple(int(port) for port in ports), f"{model} {config.model_config.quantization!r}"
    )


class NoFollowers:
    """Stands for `Followers`: requests do not wait in FastDeploy's queue here, but for another server."""

    def passes_over(self, manager: Any, request: Any) -> bool:
        return False

    def put_back(self, manager: Any) -> None:
        """Nothing was passed over."""


class RoleCache(EnginePrefixCache, ABC):
    """What both roles have: a place that peers know, and a way to their ranks."""

    preempted_wait = False
    needs_link = True

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._place = place_of(config)
        settings.export(self._place)
        self._news: deque[RankNews] = deque()
        for kind in (TransferNews, LeaseOpened, LeaseWithdrawn, LeaseEnd, RankInfo):
            self.handlers[kind] = lambda rank, news: self._news.append(RankNews(rank, news))
        self._infos: dict[int, RankInfo] = {}
        self.gate = Gate()
        """Closed while the server is paused, and before."""
        self.silence_s = settings.transfer_choice().settings.silence_s

    def _tell_ranks(self, command: TransferCommand) -> Sequence[int]:
        """Returns those that are not there."""
        assert self.link is not None, "FastDeploy launches its cache service before it serves"
        return self.link.send(command)

    def _take_news(self) -> Sequence[RankNews]:
        """What ranks have said of transfers since the last call; under the adapter's lock."""
        news = []
        while self._news:
            each = self._news.popleft()
            if isinstance(each.news, RankInfo):
                self._began(each.rank, each.news)
            else:
                news.append(each)
        return news

    def _began(self, rank: int, info: RankInfo) -> None:
        self._infos[rank] = info
        parallel, scheduler = self._config.parallel_config, self._config.scheduler_config
        if len(self._infos) == int(parallel.tensor_parallel_size):
            plane, ranks = settings.transfer_choice().plane, [self._infos[rank] for rank in sorted(self._infos)]
            role = RoleInfo(scheduler.splitwise_role, plane, self._place.host, ranks)
            try:
                (log_directory() / INFO_FILE).write_bytes(msgspec.json.encode(role))
            except OSError as error:  # serving does not need it
                logger.warning("%s cannot be written, so doctor cannot check this server: %s", INFO_FILE, error)

    @contextmanager
    def clearing(self, manager: Any) -> Iterator[None]:
        """A peer reads what a request leaves, and FastDeploy's reset of a prefill server waits for ever for a transfer
        that has not begun. Raises `CacheStateError` unless there is nothing to clear but the cache.
        """
        with self.gate.held_closed():
            if manager.requests or self.num_shared:
                raise CacheStateError(
                    f"a server with a role is not reset while it has requests (here {len(manager.requests)}) or shares "
                    "blocks with a peer: pause it, which ends both, and resume it"
                )
            yield

    @abstractmethod
    def end(self, manager: Any) -> None:
        """See `Shared.end`."""

    @abstractmethod
    def give_up(self, manager: Any) -> None:
        """See `Shared.give_up`."""

    @property
    @abstractmethod
    def num_shared(self) -> int:
        """See `Shared.num_shared`."""


class PrefillCache(PrefillAdapter, RoleCache):
    """Of a prefill server."""

    def __init__(self, config: Any) -> None:
        choice = settings.transfer_choice()
        super().__init__(config)
        os.environ.setdefault(WAIT_FOR_ANSWER, str(math.ceil(choice.settings.silence_s)))
        os.environ[ASK_UNTIL_GRANTED] = "0"  # `ask_for_room` asks again, and comes to an end
        self.followers = NoFollowers()  # type: ignore[assignment]
        self.leases = Leases(num_ranks=int(config.parallel_config.tensor_parallel_size), send=self._tell_ranks)
        self.publisher.add(self.leases.ledger, "prefill")

    def take_reports(self) -> None:
        super().take_reports()
        with self._lock:
            self._hear_ranks()

    def take_transfer_ends(self) -> list[list[str]]:
        """See `Leases.take_ended`. Any thread."""
        with self._lock:
            self._hear_ranks()
            return self.leases.take_ended()

    def _hear_ranks(self) -> None:
        for rank, news in self._take_news():
            assert not isinstance(news, TransferNews | RankInfo), f"a prefill rank tells of fetches: {news}"
            try:
                self.leases.heard(rank, news)
            except CacheStateError as error:
                logger.error("%s", error)

    def check(self) -> None:
        """Raises `InvariantError`."""
        super().check()
        with self._lock:
            self.leases.check()

    def release_stored(self, storage: EngineStorage, manager: Any) -> None:
        """They wait there until one of FastDeploy's threads takes them, see `StoredPrefixes`."""
        storage.release(manager)

    @property
    def num_shared(self) -> int:
        return self.leases.ledger.num_open

    def end(self, manager: Any) -> None:
        """They end by themselves: a request that has room at decode is complete with its first token. One that waits
        for its stored prefix goes on to ask for room, so that its client, which waits at decode, is told.
        """
        if self.storage is not None:
            self.storage.release_all()

    def give_up(self, manager: Any) -> None:
        with self._lock:
            self.leases.withdraw_all(PREFILL_PAUSED)


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
            open_step=self.open_step,
        )
        self.caches_outputs = bool(config.cache_config.enable_output_caching)
        self.followers = NoFollowers()  # type: ignore[assignment]
        self.publisher.add(self.grants.ledger, "decode")
        self.publisher.add(self.grants)

    def take_reports(self) -> None:
        """The first thing that a scheduling step does."""
        self.schedule_begins()
        super().take_reports()

    def carrier(self, manager: Any) -> list[Any]:
        """A seat without a sequence gets an empty table: that changes nothing, in any worker."""
        grant = self.copies_wait()
        if grant is None:
            return []
        task = manager._prepare_decode_task(grant.request)
        task.block_tables = []
        return [task]

    def _rank_news(self) -> Sequence[RankNews]:
        return self._take_news()

    @property
    def num_shared(self) -> int:
        return len(self.grants) + self.grants.ledger.num_open + self.grants.num_parked

    def end(self, manager: Any) -> None:
        """FastDeploy aborts those that run, `FirstTokens` those that wait."""
        with manager.lock:
            ending = manager.waiting_abort_req_id_set | manager.to_be_aborted_req_id_set
            manager.waiting_abort_req_id_set.update(manager.requests.keys() - ending)

    def give_up(self, manager: Any) -> None:
        """Ranks say when a fetch is over."""
