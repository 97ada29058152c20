"""A prefill engine and a decode engine over shadow workers. What travels between them comes when the test says so.

A slot that is being fetched holds anything until its fetch has ended. Any order of all this, with faults and several
ranks, is the world's scenario `embedded roles`.
"""

from __future__ import annotations

from types import SimpleNamespace

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.embedded.engine.offered_prefills import OfferedPrefills
from fastdeploy_kvcache_v1.embedded.engine.remote_prefills import RemotePrefills
from fastdeploy_kvcache_v1.embedded.prefill_job import PrefillAnswer
from fastdeploy_kvcache_v1.transfer.settings import TransferSettings
from tests.embedded.shadow import Harness, Recorder
from tests.world.clock import Clock
from tests.world.roles import HERE, URL, Between

BLOCK = 4
GARBAGE = 10**6


class Peers(Between):
    """`prefill` and `decode`, and the worker halves between them."""

    def __init__(self, *, decode_blocks=64, **options):
        self.clock = Clock()
        self.asked = {}
        self.dropped = set()
        self.settings = TransferSettings(secret=b"sixteen bytes or more")
        self.remote = RemotePrefills(self, [HERE], self.settings, block_size=BLOCK, vocab_size=1000, clock=self.clock)
        self.offered = OfferedPrefills()
        prefill = self._engine(64, offered=self.offered, **options)
        super().__init__(prefill, self._engine(decode_blocks, remote=self.remote, **options), 1)

    def _engine(self, num_blocks, **options):
        harness = Harness(KVCacheConfig(num_blocks, block_size=BLOCK), **options)
        return SimpleNamespace(harness=harness, core=harness.core, news=[])

    # ---- what the decode engine asks over HTTP

    def ask(self, url, job):
        assert url == URL
        recorder = self.asked[job.request_id] = Recorder()
        generation = self.prefill.harness.generation(
            job.request_id, job.prompt_ids, 1, recorder, job.sampling, offered_to=(HERE,)
        )
        self.prefill.core.submit(generation)

    def drop(self, request_id):
        self.dropped.add(request_id)

    def answer(self, request_id):
        """The prefill server's answer arrives, if there is one."""
        recorder, is_dropped = self.asked[request_id], request_id in self.dropped
        if not recorder.ended and not is_dropped:
            return
        del self.asked[request_id]
        if not recorder.ended:
            self.prefill.core.abort(request_id)
        if not is_dropped:
            error = None if recorder.failure is None else recorder.failure.message
            self.decode.core.on_prefill_answer(request_id, error or PrefillAnswer(recorder.tokens[0], 0))

    # ---- the workers

    def step(self, engine):
        """One batch there and back. False: there is nothing to send."""
        engine.core.step()
        if not engine.harness.sent:
            return False
        batch = engine.harness.sent.pop()
        for command in batch.transfers:
            self.handle(command)
        result = engine.harness.worker.run(batch)
        if engine is self.prefill:
            self.note_complete(batch, result)
        engine.core.on_step_result(result)
        engine.harness.manager.check()
        return True

    def tell_news(self, engine):
        """Everything that the worker's ranks have reported by now arrives."""
        news, engine.news = engine.news, []
        for rank, each in news:
            engine.core.on_transfer_news(each, rank)
            engine.harness.manager.check()
        return bool(news)

    def scribble(self, request_id):
        """A byte arrives."""
        self.decode.harness.worker.device[self.fetches[request_id].slots[-1]] = [GARBAGE] * BLOCK

    def arrive(self, request_id):
        """All that is fetched, if it is computed: what the offered slots hold now."""
        lease, fetch = self.leases.get(request_id), self.fetches[request_id]
        if lease is None or request_id not in self.complete:
            return False
        for source, target in zip(lease.slots[fetch.first_block :], fetch.slots, strict=True):
            self.decode.harness.worker.device[target] = list(self.prefill.harness.worker.device[source])
        self.end_fetch(request_id, None)
        return True

    # ---- requests

    def submit(self, name, prompt, max_tokens, *, remote=True, **options):
        recorder = Recorder()
        generation = self.decode.harness.generation(name, prompt, max_tokens, recorder, **options)
        generation.prefill_url = URL if remote else None
        self.decode.core.submit(generation)
        return recorder

    def settle(self):
        """Until nothing is left to do on either side, and nothing is left behind."""
        for _ in range(1000):
            busy = any(self.step(each) or self.tell_news(each) for each in (self.prefill, self.decode))
            busy |= any(self.arrive(name) for name in list(self.fetches))
            for name in list(self.asked):
                self.answer(name)
            for name in list(self.leases):
                if name not in self.fetches and name not in self.remote.ledger and name in self.complete:
                    self.end_lease(name, "nobody asks for it")
                    busy = True
            if not busy and not self.fetches and not self.asked:
                break
        assert not any((self.fetches, self.asked, self.leases)), f"{self.fetches}, {self.asked}, {self.leases}"
        for engine in (self.prefill, self.decode):
            assert engine.core.check()["idle"]
            engine.harness.manager.check_idle()
