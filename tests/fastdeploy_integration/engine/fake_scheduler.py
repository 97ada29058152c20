"""A FAKE scheduler that treats a cache manager as the host's does (order of calls, roll-backs, who owns which id).

Not FastDeploy: it has the steps of ResourceManagerV1 that touch the cache, and nothing else.
"""

import enum
import threading
import time
from collections import deque
from types import SimpleNamespace

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.adapter import PrefixCacheAdapter
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.followers import Followers
from tests.fastdeploy_integration.worker.fake_worker import FakeWorker
from tests.world.fastdeploy_host import Kind


class Status(enum.Enum):
    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class FakeGauge:
    value = None

    def set(self, value):
        self.value = value


class FakeTask:
    """What the adapter uses of the host's Request."""

    cache_salt = skip_reading_prefix_cache = skip_writing_prefix_cache = None

    def __init__(self, request_id, prompt, max_tokens=4, items=None):
        self.request_id, self.prompt_token_ids, self.output_token_ids = request_id, list(prompt), []
        self.max_tokens = max_tokens
        self.multimodal_inputs = items
        self.block_tables, self.num_cached_blocks = [], 0
        self.num_computed_tokens = self.prefill_start_index = self.prefill_end_index = 0
        self.need_prefill_tokens = len(self.prompt_token_ids)
        self.status, self.task_type, self.idx = Status.WAITING, Kind.PREFILL, -1
        self.metrics = SimpleNamespace(arrival_time=time.time())

    @property
    def num_total_tokens(self):
        return len(self.prompt_token_ids) + len(self.output_token_ids)


class Control:
    """ScheduledDecodeTask and its siblings."""

    def __init__(self, task_type, task):
        self.task_type, self.idx, self.request_id = task_type, task.idx, task.request_id
        self.block_tables = task.block_tables


def make_adapter(num_device_blocks, num_host_blocks=0, block_size=4, *, kind=PrefixCacheAdapter, **settings):
    names = "max_gpu_block_num max_cpu_block_num available_gpu_block_num free_gpu_block_num available_gpu_resource"
    names += " hit_req_rate hit_token_rate gpu_hit_token_rate cpu_hit_token_rate"
    config = KVCacheConfig(num_device_blocks, num_host_blocks, block_size, **settings)
    gauges = SimpleNamespace(**{name: FakeGauge() for name in names.split()})
    return kind(config, gauges=gauges, whole_items=True)


class FakeScheduler:
    def __init__(self, cache, *, budget=24, seats=6, output_caching=True, chance=lambda: False):
        self.cache, self.budget, self.seats = cache, budget, seats
        self.block_size = cache.manager.config.block_size
        self.output_caching = output_caching
        self.roll_back = chance
        """Asked before a matched request is scheduled; True takes its match back."""
        self.worker = FakeWorker(self.block_size)
        self.waiting, self.running, self.free_idx = deque(), [], list(range(seats))
        self.stop_flags = [True] * seats
        self.finished, self.aborting = {}, set()
        self.followers, self.lock = Followers(cache), threading.Lock()
        self.num_computed_tokens = 0
        """Of prompts."""
        self.config = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=self.block_size),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=budget),
            speculative_config=SimpleNamespace(num_speculative_tokens=0),
        )

    def add(self, task):
        self.waiting.append(task)

    def step(self):
        """schedule, send, receive the worker's tokens. Returns the batch."""
        batch = []
        failed, self.worker.failed = self.worker.failed, []
        self.cache.host_copies_failed(failed)
        self.tokens_left = self.budget
        preempted = self._schedule_running(batch)
        if not preempted:
            self._schedule_waiting(batch)
        self.followers.put_back(self)
        self.cache.send_swaps(batch)
        if batch:
            preempted_now = self.worker.receive(batch)[0]
            self.cache.batch_sent()
            for request_id in preempted_now:
                task = next(task for task in preempted if task.request_id == request_id)
                self.waiting.insert(0, task)
        self._take_tokens(self.worker.step())
        return batch

    def _schedule_running(self, batch):
        preempted = []
        for task in list(self.running):
            if task in preempted:
                continue
            decoding = task.num_computed_tokens >= task.need_prefill_tokens
            if decoding and task.request_id in self.aborting:
                self._end(task)
                batch.append(Control(Kind.ABORT, task))
                continue
            if decoding:
                if task.num_total_tokens > task.need_prefill_tokens:
                    task.num_computed_tokens = task.num_total_tokens - 1
                if len(task.block_tables) * self.block_size - task.num_total_tokens > 1:
                    continue
                if not self._make_room(2, task, preempted, batch):
                    break
                task.block_tables.extend(self.cache.allocate_gpu_blocks(2, task.request_id))
                batch.append(Control(Kind.DECODE, task))
            elif self.tokens_left > 0:
                tokens = min(self.tokens_left, task.need_prefill_tokens - task.num_computed_tokens)
                blocks = self._new_blocks(task, tokens)
                if not self._make_room(blocks, task, preempted, batch):
                    break
                self._prefill(task, tokens, blocks, batch)
        return preempted

    def _make_room(self, blocks, task, preempted, batch):
        while not self.cache.can_allocate_gpu_blocks(blocks):
            victim = self.running.pop()
            victim.status, victim.num_computed_tokens = Status.PREEMPTED, 0
            self._free(victim)
            victim.num_cached_blocks = 0
            self._leave_seat(victim)
            preempted.append(victim)
            batch.append(Control(Kind.PREEMPTED, victim))
            if victim is task:
                return False
        return True

    def _schedule_waiting(self, batch):
        passed_over = []
        self._admit_waiting(batch, passed_over)
        self.waiting.extend(passed_over)

    def _admit_waiting(self, batch, passed_over):
        while self.waiting and self.tokens_left > 0 and len(self.running) < self.seats:
            task = self.waiting[0]
            if task.status is Status.PREEMPTED:
                task.need_prefill_tokens = task.num_total_tokens
            elif self.followers.passes_over(self, task):
                passed_over.append(self.waiting.popleft())
                continue
            needed = -(-task.need_prefill_tokens // self.block_size)
            if self.cache.num_cpu_blocks > 0 and not self.cache.can_allocate_gpu_blocks(needed):
                break
            if not self._match(task):
                self._free(task)
                break
            if self.roll_back():
                self._free(task)
                break
            tokens = min(self.tokens_left, task.need_prefill_tokens - task.num_computed_tokens)
            blocks = self._new_blocks(task, tokens)
            if not self.cache.can_allocate_gpu_blocks(blocks):
                self._free(task)
                break
            self.waiting.popleft()
            self.running.append(task)
            task.status, task.idx = Status.RUNNING, self.free_idx.pop()
            self.stop_flags[task.idx] = False
            self._prefill(task, tokens, blocks, batch)

    def _match(self, task):
        try:
            table, matched, metrics = self.cache.request_match_blocks(task, self.block_size)
        except Exception:  # as the host
            return False
        assert metrics["gpu_match_token_num"] + metrics["cpu_match_token_num"] == matched
        task.block_tables = table
        task.num_computed_tokens = matched
        return True

    def _new_blocks(self, task, tokens):
        return -(-(task.num_computed_tokens + tokens) // self.block_size) - len(task.block_tables)

    def _prefill(self, task, tokens, blocks, batch):
        task.block_tables.extend(self.cache.allocate_gpu_blocks(blocks, task.request_id))
        task.prefill_start_index = task.num_computed_tokens
        task.prefill_end_index = task.num_computed_tokens + tokens
        task.num_computed_tokens += tokens
        self.tokens_left -= tokens
        self.num_computed_tokens += tokens
        batch.append(task)
        self.cache.update_cache_blocks(task, self.block_size, task.num_computed_tokens)

    def _take_tokens(self, sampled):
        for task in list(self.running):
            if task.request_id in sampled:
                task.output_token_ids.append(sampled[task.request_id])
                if len(task.output_token_ids) >= task.max_tokens:
                    self.finish(task)

    def finish(self, task):
        if self.output_caching:
            self.cache.cache_output_blocks(task, self.block_size)
        task.status = Status.FINISHED
        self.cache.write_cache_to_storage(task)
        self.worker.stop(task.request_id)
        self._end(task)
        self.finished[task.request_id] = task

    def _end(self, task):
        self._free(task)
        self.running.remove(task)
        self._leave_seat(task)

    def _free(self, task):
        self.cache.release_block_ids(task)
        self.cache.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)
        task.block_tables = []

    def _leave_seat(self, task):
        self.free_idx.append(task.idx)
        self.stop_flags[task.idx] = True

    def reset(self):
        """Pause: preempt everything, send that, empty the cache."""
        batch = []
        while self.running:
            victim = self.running.pop()
            victim.status, victim.num_computed_tokens = Status.PREEMPTED, 0
            self._free(victim)
            self._leave_seat(victim)
            self.waiting.insert(0, victim)
            batch.append(Control(Kind.PREEMPTED, victim))
        self.worker.receive(batch)
        self.cache.reset()

    def run_dry(self, limit=2000):
        while self.waiting or self.running:
            self.step()
            limit -= 1
            assert limit, "the scheduler makes no progress"


def serve(scheduler, *prompts, max_tokens=4):
    """Serve each alone; returns how many tokens of each were cached."""
    cached = []
    for tokens in prompts:
        task = FakeTask(f"r{id(tokens)}", tokens, max_tokens)
        scheduler.add(task)
        scheduler.step()
        cached.append(task.prefill_start_index)
        scheduler.run_dry()
        scheduler.cache.check()
    return cached
