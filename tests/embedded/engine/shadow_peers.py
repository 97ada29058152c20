"""A prefill engine and a decode engine over shadow workers. What travels between them comes when the test says so.

A slot that is being fetched holds anything until its fetch has ended, and a block that is offered is read at the last
moment: an engine that gives slots away too early, or uses them too early, changes tokens. Both engines may have several
worker ranks, of which each reports for itself: rank for rank one reads from the other.
"""

from __future__ import annotations

import random

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.embedded.engine.offered_prefills import OfferedPrefills
from fastdeploy_kvcache_v1.embedded.engine.remote_prefills import RemotePrefills
from fastdeploy_kvcache_v1.embedded.prefill_job import PrefillAnswer
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.storage.settings import StorageSettings
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.offer_desk import LeaseEnd
from fastdeploy_kvcache_v1.transfer.rank_messages import (
    CancelFetch,
    OpenLease,
    StartFetch,
    TransferNews,
    WithdrawLease,
)
from fastdeploy_kvcache_v1.transfer.settings import PeerPort, TransferSettings
from tests.embedded.engine.storage_server import NAMESPACE, Clock
from tests.embedded.shadow import Harness, Recorder
from tests.embedded.shadow_store import ShadowStore

BLOCK = 4
HERE = PeerPort("127.0.0.1", 1)
GARBAGE = 10**6
URL = "http://prefill"


class Engine:
    """One server. `begin` and `end` are the two halves of a step: things happen between them."""

    def __init__(self, harness, store=None):
        self.harness = harness
        self.store = store
        self.core = harness.core
        self.batch = None
        self.news = []

    def begin(self):
        """False: there is nothing to send."""
        self.core.step()
        self.harness.manager.check()
        if self.harness.sent:
            self.batch = self.harness.sent.pop()
        return self.batch is not None

    def answer_store(self):
        """Of one command. False: there is none."""
        if self.store is None or self.store.is_idle:
            return False
        for answer in self.store.answer():
            self.core.on_storage(answer)
            self.harness.manager.check()
        return True

    def tell_news(self):
        """Everything that the worker's ranks have reported by now arrives."""
        news, self.news = self.news, []
        for rank, each in news:
            self.core.on_transfer_news(each, rank)
            self.harness.manager.check()


class Peers:
    """`prefill` and `decode`, and the worker halves between them."""

    def __init__(
        self,
        *,
        seed=0,
        prefill_blocks=64,
        decode_blocks=64,
        host_blocks=0,
        fails=None,
        num_ranks=1,
        stored=None,
        **options,
    ):
        """`stored`: what both engines load from and store into, if they have storage."""
        self.num_ranks = num_ranks
        self._stored = stored
        self.random = random.Random(seed)
        self.clock = Clock()
        self.asked = {}
        self.dropped = set()
        self.settings = TransferSettings(secret=b"sixteen bytes or more")
        self.remote = RemotePrefills(
            self, [HERE] * num_ranks, self.settings, block_size=BLOCK, vocab_size=1000, clock=self.clock
        )
        self.offered = OfferedPrefills(num_ranks)
        if fails is not None:
            options["fails"] = fails
        self.prefill = self._engine(prefill_blocks, host_blocks, offered=self.offered, **options)
        self.decode = self._engine(decode_blocks, host_blocks, remote=self.remote, **options)
        self.leases: dict[str, OpenLease] = {}
        self.complete: set[str] = set()
        self.fetches: dict[str, StartFetch] = {}
        """Until every rank has reported; so are the leases."""
        self.failing: set[str] = set()
        """Fetches that failed on a rank: their content is never whole."""
        self.ranks_left: dict[OpenLease | StartFetch, set[int]] = {}
        self.num_copied = 0

    def _engine(self, device_blocks, host_blocks, **options):
        if self._stored is None:
            return Engine(Harness(KVCacheConfig(device_blocks, host_blocks, block_size=BLOCK), **options))
        config = KVCacheConfig(
            device_blocks, host_blocks, block_size=BLOCK, write_policy=WritePolicy.WRITE_THROUGH, max_queued_events=0
        )
        stores = []

        def storage(manager, worker):
            stores.append(ShadowStore(worker, self.random))
            stores[0].values = self._stored
            stores[0].failure_rate = 0.1
            settings = StorageSettings("file", "/unused", prefetch="wait_complete", min_tokens=BLOCK)
            return StorageTier(manager, settings, NAMESPACE, stores[0], clock=self.clock)

        return Engine(Harness(config, storage=storage, **options), *stores)

    # ---- what the decode engine asks over HTTP

    def ask(self, url, job):
        assert url == URL
        recorder = self.asked[job.request_id] = Recorder()
        generation = self.prefill.harness.generation(
            job.request_id, job.prompt_ids, 1, recorder, job.sampling, offered_to=(HERE,) * self.num_ranks
        )
        self.prefill.core.submit(generation)

    def drop(self, request_id):
        self.dropped.add(request_id)

    def answer(self, request_id, error=None):
        """The prefill server's answer arrives, if there is one; or its connection breaks."""
        recorder, is_dropped = self.asked[request_id], request_id in self.dropped
        if not recorder.ended and not is_dropped and error is None:
            return
        del self.asked[request_id]
        if not recorder.ended:
            self.prefill.core.abort(request_id)
        elif error is None and recorder.failure is not None:
            error = recorder.failure.message
        if not is_dropped:
            self.decode.core.on_prefill_answer(request_id, error or PrefillAnswer(recorder.tokens[0], 0))

    # ---- the workers

    def end(self, engine):
        """The worker does what the batch says, and the engine gets the result."""
        batch, engine.batch = engine.batch, None
        for command in batch.transfers:
            if isinstance(command, WithdrawLease):
                self.end_lease(command.lease, command.reason)
            elif isinstance(command, CancelFetch):
                self.fail_fetch(command.request_id, command.reason)
        result = engine.harness.worker.run(batch)
        for command in batch.transfers:
            if isinstance(command, OpenLease):
                self.leases[command.lease] = command
                self.ranks_left[command] = set(range(self.num_ranks))
            elif isinstance(command, StartFetch):
                assert not {slot for each in self.fetches.values() for slot in each.slots} & set(command.slots)
                self.fetches[command.request_id] = command
                self.ranks_left[command] = set(range(self.num_ranks))
        for task in batch.requests:
            lease = self.leases.get(task.request_id) if engine is self.prefill else None
            if lease is not None and task.start + len(task.token_ids) == lease.num_tokens:
                self.complete.update({task.request_id} - result.retry.keys())
        engine.core.on_step_result(result)
        engine.harness.manager.check()

    def step(self, engine):
        if not engine.begin():
            return False
        self.end(engine)
        return True

    def end_lease(self, lease, error=None, rank=None):
        """On one rank, or on all that have not ended it."""
        for each in self._ranks(self.leases.get(lease), rank):
            self.prefill.news.append((each, TransferNews(leases=(LeaseEnd(lease, lease, error),))))
        if lease in self.leases and not self.ranks_left[self.leases[lease]]:
            del self.ranks_left[self.leases[lease]], self.leases[lease]
            self.complete.discard(lease)

    def fail_fetch(self, request_id, error, rank=None):
        fetch = self.fetches.get(request_id)
        if fetch is not None and (rank is None or rank in self.ranks_left[fetch]):
            self.failing.add(request_id)
            self._end_fetch(request_id, error, rank)

    def _end_fetch(self, request_id, error, rank):
        fetch = self.fetches[request_id]
        for each in self._ranks(fetch, rank):
            result = FetchResult(request_id, 100, 1.0, () if error is None else fetch.slots, error)
            self.decode.news.append((each, TransferNews(fetches=(result,))))
            self.end_lease(request_id, error, each)
        if not self.ranks_left[fetch]:
            del self.fetches[request_id], self.ranks_left[fetch]
            self.failing.discard(request_id)

    def _ranks(self, command, rank):
        """Those of a lease or a fetch that end now."""
        left = self.ranks_left.get(command, set())
        ending = left & ({rank} if rank is not None else left)
        left -= ending
        return self.random.sample(sorted(ending), len(ending))

    def scribble(self, request_id):
        """A byte arrives."""
        slot = self.random.choice(self.fetches[request_id].slots)
        self.decode.harness.worker.device[slot] = [GARBAGE] * BLOCK

    def arrive(self, request_id, rank=None):
        """All that a rank fetches, or every rank that is left, if it is computed. With the last one the content is
        whole: what the offered slots hold now.
        """
        lease, fetch = self.leases.get(request_id), self.fetches[request_id]
        if lease is None or request_id not in self.complete:
            return False
        is_last = rank is None or self.ranks_left[fetch] == {rank}
        if is_last and request_id not in self.failing:
            sources = lease.slots[fetch.first_block :]
            for source, target in zip(sources, fetch.slots, strict=True):
                self.decode.harness.worker.device[target] = list(self.prefill.harness.worker.device[source])
            self.num_copied += len(sources)
        self._end_fetch(request_id, None, rank)
        return True

    # ---- requests

    def submit(self, name, prompt, max_tokens, *, remote=True, **options):
        recorder = Recorder()
        generation = self.decode.harness.generation(name, prompt, max_tokens, recorder, **options)
        generation.prefill_url = URL if remote else None
        self.decode.core.submit(generation)
        return recorder

    def settle(self, turns=10_000):
        """Without any more faults, until nothing is left to do on either side."""
        for _ in range(turns):
            busy = False
            for engine in (self.prefill, self.decode):
                if engine.batch is not None:
                    self.end(engine)
                busy |= self.step(engine) or bool(engine.news) or engine.answer_store()
                engine.tell_news()
            for name in list(self.fetches):
                busy |= self.arrive(name)
            for name in list(self.asked):
                self.answer(name)
            for name in list(self.leases):
                if name not in self.fetches and name not in self.remote.ledger and name in self.complete:
                    self.end_lease(name, "nobody asks for it")
                    busy = True
            if not busy and not self.fetches and not self.asked:
                return
        raise AssertionError(f"stuck: {self.fetches}, {self.asked}, {self.leases}")

    def check_idle(self):
        for engine in (self.prefill, self.decode):
            report = engine.core.check()
            assert report["idle"], report
            engine.harness.manager.check_idle()
        assert not self.leases
        assert not self.fetches
