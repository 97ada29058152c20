"""Run inside a FastDeploy process: `schedule` raises when it has passed over a request that is not complete yet."""

import random
from concurrent.futures import Future

from tests.fastdeploy.drive_resource_manager import Drive, make_manager


def main():
    drive = Drive(random.Random(1), make_manager(60, 0, "write_through", caching=False))
    manager, loaded = drive.manager, Future()
    manager.apply_async_preprocess = lambda request: request.async_process_futures.extend(
        [loaded] if request.request_id == "a" else []
    )
    for name in "abcd":
        drive.add(name, [ord(name)] * 20, 3)
    while not drive.num_lost:
        drive.step(lose="schedule")
    waits = "a" in [each.request_id for each in manager.waiting]
    loaded.set_result(None)
    drive.run_dry()
    print(f"RESULT waits={waits} finished={drive.finished}")


if __name__ == "__main__":
    main()
