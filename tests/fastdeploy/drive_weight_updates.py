"""Run inside a FastDeploy process: its real ResourceManagerV1 through weight updates of the legacy API.

The processes around it are the FAKE ones of tests/fastdeploy_integration/engine, and so is the worker, which checks
what every block holds.
Never more requests than seats, and blocks for all of them: 2.5 may seat a request where a preempted one still is, and
2.6 may fill its blocks with prompts that are not complete.
Usage: script SEED UPDATES POLICY.
"""

import random
import sys

from tests.fastdeploy.drive_resource_manager import Drive, make_manager, random_prompt  # activates the overlay
from tests.fastdeploy_integration.engine.fake_weight_update import World

NEVER = 1 << 30
SEATS = 3
BLOCKS = 45


class Engine:
    """The parts of FastDeploy's engine that `World` steps."""

    def __init__(self, drive):
        self.drive, self.worker, self.cache = drive, drive.worker, drive.cache
        self.schedule, self.check = drive.manager.schedule, drive.check

    def confirm(self, preempted, aborted):
        for request_id in preempted:
            self.drive.manager.reschedule_preempt_task(request_id)
        for request_id in aborted:
            self.drive.manager.recycle_abort_task(request_id)
            del self.drive.requests[request_id]
            self.drive.aborted += 1

    def take_tokens(self, sampled):
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
    world = World(Engine(drive), rng, updates=updates, patience=rng.choice([40, NEVER]), idle=1500)
    prompts = {}
    while drive.requests or not world.is_done:
        if rng.random() < 0.05 and len(drive.requests) < SEATS and not world.is_done:
            name = f"r{len(prompts)}"
            prompts[name] = random_prompt(rng)
            drive.add(name, prompts[name], rng.randrange(1, 24))
        if rng.random() < 0.0005:
            drive.abort_one()
        if world.queue.num_dropped == 0:  # an update that catches a queued batch is rare: go on until there was one
            world.num_updates = max(world.num_updates, 1)
        world.step()
        assert world.num_steps < 20_000 * (updates + world.num_updated), f"lost: {sorted(drive.requests)}"
    drive.cache.manager.check_idle()
    for name, output in drive.outputs.items():
        tokens = list(prompts[name])
        for token in output:
            assert token == hash(tuple(tokens)) % 7 + 1, name
            tokens.append(token)
    assert drive.finished + drive.aborted == len(prompts)
    print(
        f"RESULT finished={drive.finished} aborted={drive.aborted} updated={world.num_updated} "
        f"dropped={world.queue.num_dropped} swapped_in={drive.worker.num_swapped_in}"
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
