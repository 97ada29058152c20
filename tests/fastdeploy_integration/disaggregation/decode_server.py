"""FastDeploy's decode side of one adapter, whose ranks, queue and clock a test moves."""

from types import SimpleNamespace

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.decode_adapter import DecodeAdapter
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.first_tokens import FirstTokens
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.grants import Grants
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.leases import RankNews
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.pausing import Gate
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import name_of
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SwapInbox
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.rank_messages import StartFetch, TransferNews
from tests.fastdeploy_integration.engine.by_hand import Control, Kind, Status, make_adapter
from tests.world.resource_manager import ResourceManager

from .fake_requests import BLOCK, Output, engine, first_token, request

PREFIX = [1] * 12
SPARE = 1


class DecodeServer:
    """`known`: ids of requests whose clients wait. `frees_whole`: as 2.6 gives blocks back, else as 2.5."""

    def __init__(self, blocks=20, host=0, *, known=(), num_ranks=1, frees_whole=True, **settings):
        self.now, self.num_ended, self.frees_whole, self.inbox = 0.0, 0, frees_whole, SwapInbox()
        self.sent, self.absent, self.news, self.queue = [], [], [], []
        self.cache = cache = make_adapter(blocks, host, block_size=BLOCK, kind=DecodeAdapter, **settings)
        cache.grants = self.grants = Grants(
            num_ranks=num_ranks, send=lambda command: self.sent.append(command) or self.absent,
            give_back=cache.give_back, fetch_s=100.0, token_s=20.0, open_step=cache.open_step, clock=lambda: self.now,
        )  # fmt: skip
        cache.gate, cache._rank_news = Gate(), self._take_news
        self.engine = engine(ResourceManager(cache, release=26, seats=8, budget=64), *known)
        self.manager, self.front_end = self.engine.resource_manager, self.engine.scheduler
        self.tokens = FirstTokens(self.engine, cache, Output, self._count_end, clock=lambda: self.now)

    def _count_end(self):
        self.num_ended += 1

    def _take_news(self):
        news, self.news = self.news, []
        return news

    # ---- a request has blocks, and they arrive

    def allocate(self, task):
        count = -(-len(task.prompt_token_ids) // BLOCK) + SPARE
        if not self.cache.can_allocate_gpu_blocks(count):
            return False
        task.block_tables = self.cache.allocate_gpu_blocks(count, task.request_id)
        task.num_computed_tokens, task.idx = len(task.prompt_token_ids), 0
        self.manager.requests[task.request_id] = task
        return True

    def preallocate(self, task):
        is_done = self.cache.preallocate(task, self.allocate)
        self.cache.check()
        return is_done

    def granted(self, *given, **fields):
        task = request(*given, **fields)
        assert self.preallocate(task)
        return task

    def fetch(self, task):
        (command,) = [each for each in self.sent if isinstance(each, StartFetch) and each.request_id == name_of(task)]
        return command

    def report(self, task, error=None, rank=0):
        slots = () if error is None else self.fetch(task).slots
        self.news.append(RankNews(rank, TransferNews(fetches=(FetchResult(name_of(task), 1, 1.0, slots, error),))))

    def arrive(self, task, error=None, rank=0):
        self.report(task, error, rank)
        self.cache.take_news()
        self.cache.check()

    def lost(self):
        return self.cache.lost(set())

    # ---- and its first token

    def take_ready(self, task):
        """Whether it may run."""
        self.cache.take_token(first_token(task))
        return [each.request for each in self.cache.take_ready(lambda request_id: True)] == [task]

    def loop(self, *outputs, items=()):
        """One round of FastDeploy's thread, which finds `outputs` and other items. Returns the ids whose first token it
        gets, and other items.
        """
        self.queue += [*([("decode", list(outputs))] if outputs else ()), *items]
        if self.tokens.is_empty(lambda: not self.queue):
            return []
        queue, self.queue = self.queue, []
        items = self.tokens.take(lambda: queue)
        self.cache.check()
        return [each if each[0] != "decode" else [one.request_id for one in each[1]] for each in items]

    @property
    def answers(self):
        return [(each.request_id, each.error_code, each.finished) for each in self.front_end.results]

    # ---- batches

    def schedule(self, *tasks):
        self.cache.schedule_begins()
        for task in tasks:
            if task.task_type is Kind.PREFILL:
                task.output_token_ids.append(7)
                task.prefill_start_index = task.num_computed_tokens
                task.prefill_end_index = task.num_computed_tokens = task.num_computed_tokens + 1
                task.status = Status.RUNNING
        self.cache.send_swaps(list(tasks))
        self.cache.check()

    def batch(self, *tasks):
        """One that reaches the workers. Returns the steps on it."""
        self.schedule(*tasks)
        steps = self.inbox.take(tasks)
        self.cache.batch_sent()
        self.cache.check()
        return steps

    def carrier(self):
        task = Control(Kind.DECODE, SimpleNamespace(idx=0, request_id="carrier", uid=0, block_tables=[]))
        return task if self.cache.copies_wait() else None

    def run(self, task):
        """From its blocks to its first batch."""
        self.arrive(task)
        assert self.take_ready(task)
        self.batch(task)

    def free(self, task, status=Status.FINISHED):
        task.status = status
        if self.frees_whole:
            self.cache.recycle_gpu_blocks(task.block_tables, task.request_id)
        else:
            self.cache.release_block_ids(task)
            self.cache.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)
        task.block_tables = []
        self.cache.check()

    def complete(self, *tasks):
        for task in tasks:
            self.run(task)
            self.free(task)

    def served(self, *given, **fields):
        task = self.granted(*given, **fields)
        self.complete(task)
        return self.fetch(task)
