"""Run inside a FastDeploy process: drives its real ResourceManagerV1 through random lives of requests.

The worker is the FAKE one of tests/fastdeploy_integration/engine: it checks what every block holds.
Usage: script SEED STEPS HOST_BLOCKS POLICY CACHING SEATS.
"""

import pickle
import random
import sys
import threading
from dataclasses import asdict
from types import SimpleNamespace

from fastdeploy_kvcache_v1 import plugin
from tests.fastdeploy_integration.worker.fake_worker import FakeWorker

plugin.activate()  # what the .pth file does, for a checkout that is not installed

import fastdeploy  # noqa: E402, F401  (first: its modules import each other in a circle)
from fastdeploy import envs  # noqa: E402
from fastdeploy.config import CacheConfig, FDConfig, ParallelConfig  # noqa: E402
from fastdeploy.engine.args_utils import EngineArgs  # noqa: E402
from fastdeploy.engine.request import Request, RequestMetrics, RequestStatus  # noqa: E402
from fastdeploy.engine.sched.resource_manager_v1 import ResourceManagerV1  # noqa: E402
from fastdeploy.inter_communicator import EngineWorkerQueue  # noqa: E402
from fastdeploy.scheduler.config import SchedulerConfig  # noqa: E402

IS_26 = hasattr(RequestStatus, "RUNNING_PREFILL")
SEATS = 6
BLOCK_SIZE = 8


def make_manager(
    num_device_blocks,
    num_host_blocks,
    policy,
    *,
    threshold=2,
    block_size=BLOCK_SIZE,
    seats=SEATS,
    max_tokens=64,
    role="mixed",
    caching=True,
):
    """ResourceManagerV1 with the configuration objects it needs, made as FastDeploy's own tests make them."""
    engine_args = EngineArgs(
        max_num_seqs=seats,
        num_gpu_blocks_override=num_device_blocks,
        max_num_batched_tokens=max_tokens,
        write_policy=policy,
        **({"write_through_threshold": threshold} if plugin.is_enabled() else {}),
    )
    if envs.ENABLE_V1_KVCACHE_SCHEDULER == 0:  # FastDeploy switches it off where there is no GPU
        envs.__dict__.pop("ENABLE_V1_KVCACHE_SCHEDULER", None)
        envs.environment_variables["ENABLE_V1_KVCACHE_SCHEDULER"] = lambda: 1
    arguments = {**asdict(engine_args), "num_cpu_blocks": num_host_blocks}
    cache = CacheConfig(arguments)
    cache.block_size = block_size
    cache.enc_dec_block_num = 2
    cache.prealloc_dec_block_slot_num_threshold = 2
    cache.enable_prefix_caching = cache.enable_output_caching = caching
    cache.max_encoder_cache = cache.max_processor_cache = 0
    cache.bytes_per_token_per_layer = 1
    cache.kv_cache_ratio = 1.0
    model = SimpleNamespace(
        enable_mm=False,
        max_model_len=max(block_size * 16, max_tokens),
        architectures=["test_model"],
        mm_max_tokens_per_item=None,
        version=None,
        print=print,
    )
    scheduler = SchedulerConfig(arguments)
    scheduler.splitwise_role = role
    config = FDConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=ParallelConfig(arguments),
        graph_opt_config=engine_args.create_graph_optimization_config(),
        speculative_config=SimpleNamespace(method=None, num_speculative_tokens=1),
        scheduler_config=scheduler,
        test_mode=True,
    )
    return ResourceManagerV1(max_num_seqs=seats, config=config, tensor_parallel_size=1, splitwise_role=role)


def make_request(request_id, prompt, items=None):
    request = Request.from_dict({"request_id": request_id, "multimodal_inputs": {} if items is None else items})
    request.prompt_token_ids = list(prompt)
    request.prompt_token_ids_len = request.need_prefill_tokens = len(prompt)
    request.output_token_ids = []
    request.disaggregate_info = {}
    request.metrics = RequestMetrics()
    return request


class Lost(Exception):
    """What FastDeploy's loop catches around `schedule` and `put_tasks`."""


class Queue(EngineWorkerQueue):
    """FastDeploy's queue, but for its server process: one worker, which reads at once."""

    num_client = 1

    def __init__(self):
        self.breaks = None
        self.connect()

    def connect(self):
        self.lock, self.client_read_flag, self.tasks, self.message = threading.Lock(), [1], [], None

    def set_exist_tasks(self, flag):
        if self.breaks != "put":
            self.message = pickle.dumps(self.tasks)  # as the proxies of its server do
        if self.breaks is not None:
            raise Lost("the queue is broken")

    def exist_tasks(self):
        return False

    def take(self):
        ((tasks, _),) = pickle.loads(self.message)
        self.connect()
        return tasks


class Drive:
    def __init__(self, rng, manager):
        self.queue, self.num_lost = Queue(), 0
        self.later = {}
        """Requests, and their limits, whose id a live one has."""
        self.rng, self.manager, self.cache = rng, manager, manager.cache_manager
        self.worker = FakeWorker(manager.config.cache_config.block_size)
        self.requests, self.limits, self.ended = {}, {}, []
        self.lateness = 0.0
        """How often the engine hears late of a request preempted or aborted; meanwhile its last token may come."""
        self.news = []
        """What it has not heard yet: rows, and the requests that the worker had there."""
        self.finished = self.preempted = self.aborted = self.resets = self.idle = self.crossed = 0
        self.outputs = {}

    def add(self, request_id, prompt, limit, items=None):
        request = make_request(request_id, prompt, items)
        if request_id in self.requests:
            self.later[request_id] = request, limit
        else:
            self.requests[request_id], self.limits[request_id] = request, limit
        self.manager.add_request(request)

    def end(self, request_id):
        """Returns the request. One that waited for its id takes its place."""
        request = self.requests.pop(request_id)
        self.ended = [*self.ended[-4:], request_id]
        if request_id in self.later:
            self.requests[request_id], self.limits[request_id] = self.later.pop(request_id)
        return request

    def step(self, lose=None):
        """As FastDeploy's loop: what raises is logged. `lose` names the place where this batch is lost."""
        if self.news and self.rng.random() >= self.lateness:
            self.hear()
        try:
            tasks = self.schedule(lose)
        except Lost:
            tasks = []
            self.num_lost += 1
        if self.lateness:
            self.cross()
        self.check()
        sampled = self.worker.step()
        self.idle = 0 if tasks or sampled else self.idle + 1
        if self.idle > 100 and self.stuck_in_prefill():
            self.finish(self.manager.running[-1].request_id)
        for request_id, token in sampled.items():
            request = self.requests.get(request_id)
            if request is not None and request.status.name.startswith("RUNNING"):
                request.output_token_ids.append(token)
                if len(request.output_token_ids) >= self.limits[request_id]:
                    self.finish(request_id)
        self.check()

    def schedule(self, lose):
        if lose == "schedule":
            self.raise_midway()
        try:
            tasks, errors = self.manager.schedule()
        finally:
            vars(self.manager).pop("_get_num_new_tokens", None)
        assert not errors, errors
        self.check()
        if tasks and lose == "before put":
            raise Lost("between the two")
        if tasks:
            self.queue.breaks = lose if lose in ("put", "after put") else None
            try:
                self.queue.put_tasks((tasks, len(tasks)))
            finally:
                if self.queue.message is not None:
                    self.deliver(self.queue.take())
                self.queue.connect()
        return tasks

    def raise_midway(self):
        """Where FastDeploy asserts what a multimodal request has, for the second prompt of a batch or a later one."""
        original, passed = self.manager._get_num_new_tokens, self.rng.randrange(3)

        def raising(request, budget):
            nonlocal passed
            if passed == 0:
                raise Lost("patch_idx")
            passed -= 1
            return original(request, budget)

        self.manager._get_num_new_tokens = raising

    def stuck_in_prefill(self):
        """2.6 preempts only decoding requests: with a tiny cache, unfinished prefills can hold all blocks for ever."""
        return self.manager.running and all(each.status.name == "RUNNING_PREFILL" for each in self.manager.running)

    def deliver(self, tasks):
        self.worker.receive(tasks)
        rows = [task.idx for task in tasks if task.task_type.name in ("PREEMPTED", "ABORT")]
        self.news += [(idx, self.manager.tasks_list[idx]) for idx in rows]
        if not self.lateness:
            self.hear()

    def hear(self):
        """As FastDeploy's reader of tokens: the row tells which request it is."""
        for idx, request in self.news:
            if request is None or self.manager.tasks_list[idx] is not request:
                continue
            if request.request_id in self.manager.to_be_aborted_req_id_set:
                self.aborted += 1
                self.manager.recycle_abort_task(request.request_id)
                self.end(request.request_id)
            elif request.request_id in self.manager.to_be_rescheduled_request_id_set:
                self.preempted += 1
                self.manager.reschedule_preempt_task(request.request_id)
        self.news = []

    def cross(self):
        """The last token of a request comes while its abortion or preemption is on its way, or was lost."""
        leaving = self.manager.to_be_aborted_req_id_set | self.manager.to_be_rescheduled_request_id_set
        for request_id in sorted(leaving & self.requests.keys()):
            if self.requests[request_id].status.name == "PREEMPTED" and self.rng.random() < 0.3:
                self.crossed += 1
                self.finish(request_id)

    def finish(self, request_id):
        request = self.requests[request_id]
        self.worker.stop(request_id)
        self.manager.cache_output_tokens(request)
        self.outputs[request_id] = list(request.output_token_ids)
        if self.rng.random() < 0.3:
            self.manager.finish_requests_async([request_id]).result()
        else:
            self.manager.finish_requests([request_id])
        self.end(request_id)
        self.finished += 1

    def abort_one(self):
        if self.manager.running:
            self.manager.add_abort_req_ids(self.rng.choice(self.manager.running).request_id)

    def preempt_last(self):
        """As FastDeploy does it for want of blocks, which 2.6 nearly always avoids by holding some back."""
        with self.manager.lock:
            decoding = [each for each in self.manager.running if each.num_computed_tokens >= each.need_prefill_tokens]
            if not decoding or len(self.manager.running) < 2:
                return
            request = decoding[-1]
            self.manager.running.remove(request)
            request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
            self.manager._free_blocks(request)
            request.num_cached_blocks = 0
            self.manager.to_be_rescheduled_request_id_set.add(request.request_id)
        self.deliver([self.manager._prepare_preempt_task(request)])

    def reset(self):
        """As a pause does it: preempt everything (2.6: abort and drain), then empty the cache from another thread.

        Requests that wait outside FastDeploy for their id end with it.
        """
        if IS_26 and self.manager.waiting_abort_req_id_set:
            return
        if not IS_26:
            tasks = self.manager.preempted_all()
            if tasks:
                self.deliver(tasks)
            self.hear()
        else:
            self.manager.add_abort_req_ids(list(self.requests))
            self.run_dry()
            self.manager.waiting_abort_req_id_set.clear()
        outside = {id(each) for each in self.cache.held_back._requests} if plugin.is_enabled() else set()
        thread = threading.Thread(target=self.cache.reset)
        thread.start()
        thread.join()
        self.later = {name: later for name, later in self.later.items() if id(later[0]) not in outside}
        self.requests = {name: each for name, each in self.requests.items() if id(each) not in outside}
        self.resets += 1

    def check(self):
        if plugin.is_enabled():
            self.cache.check()

    def run_dry(self):
        for _ in range(5000):
            if not self.requests:
                return
            self.step()
        self.manager.log_status()
        states = {each.request_id: (each.status.name, len(each.block_tables)) for each in self.requests.values()}
        queues = {name: len(getattr(self.manager, name)) for name in ("waiting", "running", "requests")}
        pending = sorted(self.manager.to_be_rescheduled_request_id_set | self.manager.to_be_aborted_req_id_set)
        raise AssertionError(f"no progress: {states}, {queues}, pending {pending}, free {self.cache.num_gpu_blocks}")


def random_prompt(rng):
    common = [rng.randrange(4) + 1] * (BLOCK_SIZE * 10)
    return common[: rng.randrange(len(common))] + [rng.randrange(1, 50) for _ in range(rng.randrange(1, 20))]


LOSSES = ["schedule", "before put", "put", "after put"]
"""Where a batch is lost. After put: it is in the queue, and FastDeploy does not know."""


def random_request(rng, drive, number):
    """Mostly a new one; some cannot be hashed, some have the id of a live one, or of one that has just ended."""
    action = rng.random()
    request_id = f"r{number}"
    if action < 0.05 and drive.requests.keys() - drive.later.keys():
        request_id = rng.choice(sorted(drive.requests.keys() - drive.later.keys()))
    elif 0.1 < action < 0.3 and (ended := [each for each in drive.ended if each not in drive.requests]):
        request_id = rng.choice(ended)
    items = {"mm_positions": [None], "mm_hashes": ["h"]} if action > 0.95 else None
    drive.add(request_id, random_prompt(rng), rng.randrange(1, 24), items)
    return items is not None, request_id in drive.later


class KeptUses:
    """Counts how often a request was matched with hashes of an earlier match."""

    def __init__(self, kept):
        self.count, self._take = 0, kept.take
        kept.take = self._counted

    def _counted(self, task):
        tokens = self._take(task)
        self.count += tokens is not None
        return tokens


def main(seed, steps, host_blocks, policy, caching, seats):
    rng = random.Random(f"{seed} {host_blocks} {policy}")
    drive = Drive(rng, make_manager(28, host_blocks, policy, caching=bool(caching), seats=seats))
    drive.lateness = 0.5
    cache = drive.manager.config.cache_config
    assert drive.cache.launch_cache_manager(cache, 1, ["0"], "127.0.0.1", 0, "", False) == []
    assert drive.cache.updates is None, "without --dynamic-load-weight nothing watches for weight updates"
    kept = KeptUses(drive.cache._kept)
    drive.cache._batch.prefills._worth_tokens = BLOCK_SIZE  # every block is worth a batch of waiting
    poisoned = doubled = 0
    for number in range(steps):
        action = rng.random()
        if action < 0.4:
            if len(drive.requests) < 12:
                is_poisoned, is_double = random_request(rng, drive, number)
                poisoned += is_poisoned
                doubled += is_double
        elif action < 0.43:
            drive.abort_one()
        elif action < 0.435:
            drive.reset()
        elif action < 0.445:
            drive.preempt_last()
        elif action < 0.45:
            drive.manager._free_blocks(make_request(f"unknown{number}", [1]))
        drive.step(rng.choice(LOSSES) if rng.random() < 0.03 else None)
    drive.manager.waiting_abort_req_id_set.clear()
    drive.run_dry()
    drive.cache.manager.check_idle()
    worker, counters = drive.worker, drive.cache.manager.stats().counters
    print(
        f"RESULT finished={drive.finished} preempted={drive.preempted} aborted={drive.aborted} resets={drive.resets} "
        f"swapped_in={worker.num_swapped_in} swapped_out={worker.num_swapped_out} lost={drive.num_lost} "
        f"poisoned={poisoned} doubled={doubled} kept={kept.count} crossed={drive.crossed} "
        f"waited={counters.shared_prefill_requests} shared={counters.shared_prefill_tokens}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], int(sys.argv[5]), int(sys.argv[6]))
