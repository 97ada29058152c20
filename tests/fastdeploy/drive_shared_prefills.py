"""Run inside a FastDeploy process: equal prompts come to its real ResourceManagerV1 at once. Usage: script."""

import random

from tests.fastdeploy.drive_resource_manager import Drive, make_manager

NUM_PROMPTS = 16
BLOCK_SIZE = 8


def computed_tokens(prompts, budget, worth_tokens):
    """Prompt tokens of all batches; in the end everything was served, in the order in which it came."""
    manager = make_manager(4000, 0, "write_through", block_size=BLOCK_SIZE, seats=NUM_PROMPTS, max_tokens=budget)
    drive = Drive(random.Random(1), manager)
    drive.cache._batch.prefills._worth_tokens = worth_tokens
    schedule, computed, started = manager.schedule, 0, {}

    def counting():
        nonlocal computed
        tasks, errors = schedule()
        for task in tasks:
            if task.task_type.name == "PREFILL":
                computed += task.prefill_end_index - task.prefill_start_index
                started.setdefault(task.request_id)
        return tasks, errors

    manager.schedule = counting
    for index, prompt in enumerate(prompts):
        drive.add(f"r{index}", prompt, 4)
    drive.run_dry()
    drive.cache.manager.check_idle()
    assert list(started) == [f"r{index}" for index in range(len(prompts))], "nobody is passed for ever"
    assert len({tuple(output) for output in drive.outputs.values()}) == len({tuple(prompt) for prompt in prompts})
    return computed


def main():
    equal = list(range(1, 507))
    shared = [[*equal[:450], *range(index, index + 50)] for index in range(NUM_PROMPTS)]
    for budget in (128, 16384):
        for case, prompts in (("equal", [equal] * NUM_PROMPTS), ("shared", shared)):
            waiting, alone = (computed_tokens(prompts, budget, worth) for worth in (256, 0))
            print(f"RESULT {case} budget={budget} waiting={waiting} alone={alone}")


if __name__ == "__main__":
    main()
