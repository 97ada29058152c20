"""Run inside a FastDeploy process: its real ResourceManagerV1 through weight updates of the legacy API.

The API and the workers' loop are those of tests/world, and the worker is FAKE: it checks what every block holds.
Never more requests than seats, and blocks for all of them: 2.5 may seat a request where a preempted one still is, and
2.6 may fill its blocks with prompts that are not complete.
Usage: script SEED UPDATES POLICY.
"""

import pickle
import random
import sys
from types import SimpleNamespace

from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches
from tests.fastdeploy.drive_resource_manager import Drive, make_manager, random_prompt  # activates the overlay
from tests.world.fastdeploy_host import Queue
from tests.world.weight_updates import Updater

SEATS = 3
BLOCKS = 45


class Engine:
    """The parts of FastDeploy's engine and worker whose turns come in any order."""

    def __init__(self, drive):
        self.drive, self.cache_manager = drive, drive.cache
        self.queue, self.messages, self.worker = Queue(), [], self

    def take(self, rng):
        if self.queue.batch is not None:
            batch, self.queue.batch = self.queue.batch, None
            self.messages.append((*self.drive.worker.receive(pickle.loads(batch)), {}))

    def run(self, rng):
        self.messages.append(([], [], self.drive.worker.step()))

    def drop_rows(self):
        worker = self.drive.worker
        worker.rows, worker.device, worker.host = {}, {}, {}

    @property
    def is_idle(self):
        return not self.messages

    def schedule(self, rng):
        if not self.queue.exist_tasks():
            tasks, _ = self.drive.manager.schedule()
            if tasks:
                self.put(tasks)

    def put(self, tasks):
        patches.put_tasks(self.queue.put_tasks, self.queue, ((tasks, len(tasks)),), {})

    def read(self, rng):
        preempted, aborted, sampled = self.messages.pop(0) if self.messages else ([], [], {})
        for request_id in preempted:
            self.drive.manager.reschedule_preempt_task(request_id)
        for request_id in aborted:
            self.drive.manager.recycle_abort_task(request_id)
            del self.drive.requests[request_id]
            self.drive.aborted += 1
        for request_id, token in sampled.items():
            request = self.drive.requests.get(request_id)
            if request is not None and request.status.name.startswith("RUNNING"):
                if request.status.name == "RUNNING_PREFILL":
                    request.status = type(request.status).RUNNING_DECODE  # as FastDeploy's token processor does
                request.output_token_ids.append(token)
                if len(request.output_token_ids) >= self.drive.limits[request_id]:
                    self.drive.finish(request_id)


def main(seed, updates, policy):
    rng = random.Random(f"{seed} {policy}")
    drive = Drive(rng, make_manager(BLOCKS, 120, policy, threshold=1, seats=SEATS))
    engine, world = Engine(drive), SimpleNamespace(faults=SimpleNamespace(are_over=False), weights=0)
    updater = Updater(world, engine, rng, idle_turns=400)
    engine.put = updater.put_later(engine.put)
    events = [engine.schedule, engine.take, engine.read, updater.api, updater.poll]
    prompts, turns = {}, 0
    while drive.requests or not (world.faults.are_over and updater.is_idle):
        world.faults.are_over = updater.num_updated >= updates and updater.num_dropped > 0
        if rng.random() < 0.05 and len(drive.requests) < SEATS and not world.faults.are_over:
            name = f"r{len(prompts)}"
            prompts[name] = random_prompt(rng)
            drive.add(name, prompts[name], rng.randrange(1, 24))
        if rng.random() < 0.0005:
            drive.abort_one()
        rng.choice(events)(rng)
        drive.check()
        turns += 1
        assert turns < 20_000 * (updates + updater.num_updated), f"lost: {sorted(drive.requests)}"
    drive.cache.manager.check_idle()
    for name, output in drive.outputs.items():
        tokens = list(prompts[name])
        for token in output:
            assert token == hash(tuple(tokens)) % 7 + 1, name
            tokens.append(token)
    assert drive.finished + drive.aborted == len(prompts)
    print(
        f"RESULT finished={drive.finished} aborted={drive.aborted} updated={updater.num_updated} "
        f"dropped={updater.num_dropped} swapped_in={drive.worker.num_swapped_in}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
