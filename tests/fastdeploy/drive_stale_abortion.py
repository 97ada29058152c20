"""Run inside a FastDeploy process: a request ends while its abortion is on its way, its id comes again, and then the
batch of another one is lost.
"""

import random

from tests.fastdeploy.drive_resource_manager import Drive, make_manager


def run_until_running(drive, request_id):
    while request_id not in [each.request_id for each in drive.manager.running]:
        drive.step()


def main():
    drive = Drive(random.Random(1), make_manager(40, 0, "write_through"))
    manager = drive.manager
    drive.add("r", [1] * 20, 60)
    run_until_running(drive, "r")
    manager.add_abort_req_ids("r")
    while "r" not in manager.to_be_aborted_req_id_set:
        manager.schedule()
    manager.cache_manager.transit.sent()  # the worker has it
    drive.finish("r")  # its last token was sent before
    drive.add("r", [2] * 20, 60)
    run_until_running(drive, "r")
    drive.add("s", [3] * 20, 3)
    while not drive.num_lost:
        drive.step(lose="before put")
    manager.cache_manager.transit.recover(manager)
    running = [each.request_id for each in manager.running]
    drive.run_dry()
    manager.cache_manager.manager.check_idle()
    print(f"RESULT running={running} finished={drive.finished}")


if __name__ == "__main__":
    main()
