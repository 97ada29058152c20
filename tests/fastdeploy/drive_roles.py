"""Run inside a FastDeploy process: its real ResourceManagerV1 twice, as prefill and as decode, over our adapters.

The workers are FAKE ones that check what every block holds; the transfers between them go block by block, at random
times, and fail or are cancelled at random; batches reach the decode worker late, and some of both are lost. At the end
servers are paused as well.
Usage: script SEED STEPS BLOCKS HOST_BLOCKS...: blocks of decode, and of both host tiers, one run for each number.
"""

import os
import random
import sys
import tempfile
from collections import Counter, deque
from pathlib import Path
from types import SimpleNamespace

_secret = Path(tempfile.mkdtemp()) / "secret"
_secret.write_text("0123456789abcdef")
os.environ["FASTDEPLOY_KVCACHE_PEER_SECRET_FILE"] = str(_secret)
os.environ["FASTDEPLOY_KVCACHE_CPU_RUN"] = str(_secret.parent)

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import role_caches  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.first_tokens import FirstTokens  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.rank_channel import RankNews  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.settings import RankPlace  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import name_of  # noqa: E402
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult  # noqa: E402
from fastdeploy_kvcache_v1.transfer.rank_messages import StartFetch, TransferNews  # noqa: E402
from tests.fastdeploy.drive_resource_manager import (  # noqa: E402  (activates the overlay)
    BLOCK_SIZE,
    Lost,
    Queue,
    make_manager,
    make_request,
)
from tests.fastdeploy_integration.worker.fake_worker import FakeWorker  # noqa: E402

role_caches.place_of = lambda config: RankPlace("127.0.0.1", (1,), "a model")

from fastdeploy.engine.request import CompletionOutput, Request, RequestMetrics, RequestOutput  # noqa: E402

END = 9
"""No FAKE worker samples it."""


class FrontEnd:
    """FastDeploy's LocalScheduler."""

    def __init__(self):
        self.requests, self.errors = set(), Counter()

    def has_request(self, request_id):
        return request_id in self.requests

    def put_results(self, outputs):
        for output in outputs:
            if output.finished:
                self.requests.discard(output.request_id)
                self.errors[output.error_code] += 1


class Rank:
    """The decode worker's end of the fetches, and the sockets to it."""

    def __init__(self, rng, worker):
        self.rng, self.worker = rng, worker
        self.fetches, self.ended, self.sources = {}, [], {}
        self.outcome = {}
        """By name: whether all bytes are there; what prefill learns."""
        self.num_fetched = self.num_found = 0
        """Blocks of prompts whose fetch ended well: those that came, and those that were here."""

    def send(self, command):
        if isinstance(command, StartFetch):
            self.fetches[command.request_id] = command, list(range(len(command.slots)))
        elif command.request_id in self.fetches:
            self.end(command.request_id, "cancelled")
        return ()

    def end(self, name, error=None):
        command, _ = self.fetches.pop(name)
        self.outcome[name] = error is None
        if error is None:
            self.num_fetched += len(command.slots)
            self.num_found += command.first_block
        self.ended.append(FetchResult(name, len(command.slots), 1.0, () if error is None else command.slots, error))

    def take(self):
        ended, self.ended = self.ended, []
        return [RankNews(0, TransferNews(fetches=tuple(ended)))] if ended else []

    def close(self):
        """Nothing is open."""

    def step(self):
        """A block of some fetches arrives: in any order, and never before the worker has its batch."""
        for name, (command, left) in list(self.fetches.items()):
            source = self.sources.get(name)
            if command.after_step > self.worker.last_step or source is None or self.rng.random() < 0.5:
                continue
            if self.rng.random() < 0.02:
                self.worker.device[command.slots[0]] = {0: "torn"}
                self.end(name, "the link broke")
                continue
            if left:
                block = left.pop(self.rng.randrange(len(left)))
                self.worker.device[command.slots[block]] = dict(source[command.first_block + block])
            if not left:
                self.end(name)


class Roles:
    def __init__(self, rng, num_blocks, num_host_blocks):
        self.rng, self.counts = rng, Counter()
        device_blocks = {0: 64, 80: 40}.get(num_host_blocks, 24)  # the last is tight
        self.prefill = make_manager(device_blocks, num_host_blocks, "write_through", role="prefill")
        self.decode = make_manager(num_blocks, num_host_blocks, "auto", role="decode")
        self.workers = FakeWorker(BLOCK_SIZE), FakeWorker(BLOCK_SIZE)
        # Else a batch may be on its way that reads the copy, and the FAKE worker computes nothing again.
        self.workers[1].fails = lambda: not self.late and rng.random() < 0.2
        self.rank = self.decode.cache_manager._ranks = Rank(rng, self.workers[1])
        self.front = FrontEnd()
        engine = SimpleNamespace(
            resource_manager=self.decode, scheduler=self.front, token_processor=SimpleNamespace(tokens_counter={})
        )
        self.tokens = FirstTokens(engine, self.decode.cache_manager, RequestOutput)
        self.queues = Queue(), Queue()
        self.asking, self.computing, self.messages, self.late = [], {}, [], deque()
        self.limits, self.conversations = {}, []

    # ---- prefill

    def add(self, request_id, prompt, limit):
        request = make_request(request_id, prompt)
        request.eos_token_ids = [END]
        request.disaggregate_info = {"prefill_ip": "p", "prefill_connector_port": 1}
        if not self.prefill.preallocate_resource_in_p(request):
            self.counts["no room at prefill"] += 1
            return
        self.front.requests.add(request_id)
        self.limits[request_id] = limit
        self.asking.append(request)

    def ask(self):
        if not self.prefill.cache_manager.gate.is_open:
            for request in self.asking:
                self.prefill.pre_recycle_resource(request.request_id)
                self.fail(request, 502)
            self.asking.clear()
        for request in self.rng.sample(self.asking, len(self.asking)):
            times = 2 if self.rng.random() < 0.1 else 1
            granted = [
                self.decode.preallocate_resource_in_d(Request.from_dict(request.to_dict())) for _ in range(times)
            ]
            self.counts["sent twice"] += granted == [True, True]
            if not granted[-1] and self.rng.random() < 0.995:
                continue
            self.asking.remove(request)
            if not granted[-1] or self.rng.random() < 0.05:
                self.counts["refused" if not granted[-1] else "prefill died after the grant"] += 1
                self.prefill.pre_recycle_resource(request.request_id)
                self.fail(request, 500)
                if granted[-1] and name_of(request) in self.rank.fetches:
                    self.rank.end(name_of(request), "the prefill server died")
            else:
                self.prefill.add_request_in_p([request])

    def next_prompt(self):
        """Often the next turn of a conversation."""
        new = random_prompt(self.rng)
        if not self.conversations or self.rng.random() < 0.5:
            return new
        return [*self.rng.choice(self.conversations[-4:]), *new][: BLOCK_SIZE * 10]

    def fail(self, request, code):
        error = RequestOutput(
            request_id=request.request_id, error_code=code, error_msg="no", ic_req_data=request.ic_req_data
        )
        self.messages.append(self.travelled(error))

    def travelled(self, output):
        output.metrics = output.metrics or RequestMetrics()
        return RequestOutput.from_dict(output.to_dict())

    def step_prefill(self):
        worker = self.workers[0]
        preempted, _ = worker.receive(self.batch(self.prefill, self.queues[0]))
        for request_id in preempted:
            self.counts["computed again"] += 1
            self.prefill.reschedule_preempt_task(request_id)
        for request_id, token in worker.step().items():
            request = self.prefill.requests[request_id]
            worker.stop(request_id)
            blocks = [
                worker.device[slot] for slot in request.block_tables[: -(-len(request.prompt_token_ids) // BLOCK_SIZE)]
            ]
            self.rank.sources[name_of(request)] = blocks
            self.computing[request_id] = request, token
        for request_id, (request, token) in list(self.computing.items()):
            outcome = self.rank.outcome.get(name_of(request))
            if outcome is None and self.rng.random() < 0.02:
                self.counts["token before its blocks"] += 1
                self.send_first(request, token)  # as 2.5 does for an id that it has seen before
            if outcome is None:
                continue
            del self.computing[request_id]
            if outcome:
                self.send_first(request, END if self.rng.random() < 0.05 else token)
            else:
                self.fail(request, 501)
            self.prefill.finish_requests([request_id])

    def send_first(self, request, token):
        first = RequestOutput(
            request_id=request.request_id,
            outputs=CompletionOutput(index=0, send_idx=0, token_ids=[token]),
            finished=True,
            ic_req_data=request.ic_req_data,
        )
        self.messages += [self.travelled(first) for _ in range(2 if self.rng.random() < 0.1 else 1)]

    # ---- decode

    def step_decode(self):
        self.take_messages()
        worker, cache = self.workers[1], self.decode.cache_manager
        self.counts["failed host copies"] += len(worker.failed)
        cache.host_copies_failed(worker.failed)
        worker.failed = []
        tasks = self.batch(self.decode, self.queues[1])
        if tasks:
            self.late.append(tasks)
        while self.late and self.rng.random() < 0.5:
            preempted, aborted = worker.receive(self.late.popleft())
            for request_id in preempted:
                self.counts["preempted"] += 1
                self.decode.reschedule_preempt_task(request_id)
                assert request_id not in self.decode.requests, "its client was told that it has ended"
                self.front.requests.discard(request_id)
            for request_id in aborted:
                self.counts["aborted while it ran"] += 1
                self.decode.recycle_abort_task(request_id)
                self.front.requests.discard(request_id)
        self.rank.step()
        for request_id, token in worker.step().items():
            request = self.decode.requests.get(request_id)
            if request is None or request not in self.decode.running:
                continue
            request.output_token_ids.append(token)
            if len(request.output_token_ids) >= self.limits[request_id]:
                worker.stop(request_id)
                self.conversations.append([*request.prompt_token_ids, *request.output_token_ids])
                self.decode.cache_output_tokens(request)
                self.decode.finish_requests([request_id])
                self.front.requests.discard(request_id)
                self.counts["finished"] += 1

    def take_messages(self):
        arrived = [each for each in self.messages if self.rng.random() < 0.5]
        self.messages = [each for each in self.messages if not any(each is one for one in arrived)]
        queue = [("decode", [each]) for each in arrived]
        if self.tokens.is_empty(lambda: not queue):
            return
        for _, outputs in self.tokens.take(lambda: queue):
            for output in outputs:
                self.counts["started"] += 1
                self.decode.add_prefilled_request(output)

    def batch(self, manager, queue):
        """As FastDeploy's loop: what raises is logged."""
        is_worth_losing = manager is self.decode or any(not each.num_computed_tokens for each in manager.running)
        fate = self.rng.random() if is_worth_losing else 1.0
        fate *= 5 if manager is self.decode else 1
        try:
            if fate < 0.1:
                self.raise_midway(manager)
            tasks, errors = manager.schedule()
        except Lost:
            self.counts["lost"] += 1
            return []
        finally:
            vars(manager).pop("_get_num_new_tokens", None)
        assert not errors, errors
        if not tasks:
            return []
        if fate < 0.2:
            self.counts["lost"] += 1
            return []
        queue.put_tasks((tasks, len(tasks)))
        taken = queue.take()
        queue.connect()
        return taken

    # ---- both

    def raise_midway(self, manager):
        original, passed = manager._get_num_new_tokens, self.rng.choice([0, 0, 1])

        def raising(request, budget):
            nonlocal passed
            num_tokens = original(request, budget)
            if passed == 0:
                raise Lost("patch_idx")
            passed -= 1
            return num_tokens

        manager._get_num_new_tokens = raising

    def step(self):
        self.ask()
        self.step_prefill()
        self.step_decode()
        self.check()

    def abort_one(self):
        live = sorted(self.decode.requests.keys() - self.decode.to_be_aborted_req_id_set)
        if live:
            request_id = self.rng.choice(live)
            self.counts["aborted"] += 1
            self.decode.add_abort_req_ids(request_id)

    def pause(self, role):
        """And resume. Messages that are on their way arrive meanwhile, or afterwards."""
        manager = {"prefill": self.prefill, "decode": self.decode}[role]
        cache = manager.cache_manager
        self.counts[f"paused {role}"] += 1
        cache.gate.close()
        for _ in range(3000):
            if not (manager.requests or cache.num_shared or self.late):
                break
            cache.end(manager)
            self.step()
        assert not manager.requests, "a pause comes to an end"
        assert not cache.num_shared
        cache.reset()
        assert len(cache.gpu_free_block_list) == cache.num_gpu_blocks
        for _ in range(self.rng.randrange(20)):
            self.step()
        cache.gate.open()

    def check(self):
        for request in self.prefill.running:
            assert len(request.block_tables) * BLOCK_SIZE >= request.need_prefill_tokens, "all of its blocks, always"
        self.prefill.cache_manager.check()
        self.decode.cache_manager.check()

    def run_dry(self):
        for _ in range(3000):
            if not (self.front.requests or self.decode.requests or self.messages or self.late or self.computing):
                break
            self.step()
        states = {
            name: (each.status.name, each.idx, each in self.decode.running, each in self.decode.waiting)
            for name, each in self.decode.requests.items()
        }
        assert not self.front.requests, (self.front.requests, states, self.rank.fetches.keys())
        assert not self.decode.requests
        assert not self.prefill.requests
        self.decode.cache_manager.check_idle()
        assert all(self.decode.stop_flags)
        assert all(self.prefill.stop_flags)
        self.prefill.cache_manager.manager.check_idle()


def random_prompt(rng):
    common = [rng.randrange(3) + 1] * (BLOCK_SIZE * 6)
    return common[: rng.randrange(len(common))] + [rng.randrange(1, 8) for _ in range(rng.randrange(1, 20))]


def main(seed, steps, num_blocks, num_host_blocks):
    rng = random.Random(f"{seed} {num_blocks} {num_host_blocks}")
    roles = Roles(rng, num_blocks, num_host_blocks)
    for number in range(steps + steps // 4):
        action = rng.random()
        if action < 0.3 and len(roles.front.requests) < 10:
            roles.add(f"r{number}", roles.next_prompt(), rng.randrange(2, 60))
        elif action < 0.33:
            roles.abort_one()
        elif action > 0.96 and number >= steps:
            roles.pause(rng.choice(["prefill", "decode"]))
        roles.step()
    roles.run_dry()
    counts = {**roles.counts, **{f"answered {code}": count for code, count in roles.front.errors.items()}}
    counts["stray"] = roles.decode.cache_manager.grants.num_stray_tokens
    for name, manager in (("prefill", roles.prefill), ("decode", roles.decode)):
        counters = manager.cache_manager.manager.stats().counters
        counts[f"{name} hits"], counts[f"{name} host hits"] = counters.device_hit_tokens, counters.host_hit_tokens
        counts[f"{name} swapped in"] = counters.swap_in_blocks
    counts["fetched"], counts["found"] = roles.rank.num_fetched, roles.rank.num_found
    print("RESULT", "; ".join(f"{name}={count}" for name, count in sorted(counts.items())))


if __name__ == "__main__":
    seed, steps, num_blocks, *host_tiers = map(int, sys.argv[1:])
    for num_host_blocks in host_tiers:
        main(seed, steps, num_blocks, num_host_blocks)
