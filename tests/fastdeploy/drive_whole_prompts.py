"""Run inside a FastDeploy process: its real ResourceManagerV1, told not to cut prompts. Prints whether it does."""

import os
import random

from tests.fastdeploy.drive_resource_manager import Drive, make_manager

LENGTHS = (40, 40, 24, 64, 1, 63)


def main():
    os.environ["FD_DISABLE_CHUNKED_PREFILL"] = "1"
    drive, chunks = Drive(random.Random(1), make_manager(80, 0, "write_through", caching=False)), 0
    for number, length in enumerate(LENGTHS):
        drive.add(f"r{number}", [number + 1] * length, 4)
    deliver = drive.deliver

    def counted(tasks):
        nonlocal chunks
        for task in tasks:
            if task.task_type.name == "PREFILL":
                chunks += (task.prefill_start_index, task.prefill_end_index) != (0, task.prompt_token_ids_len)
        deliver(tasks)

    drive.deliver = counted
    drive.run_dry()
    print(f"RESULT finished={drive.finished} cut={chunks > 0}")


if __name__ == "__main__":
    main()
