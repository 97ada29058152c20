"""Run inside a FastDeploy process: the batch that is lost has a request for every seat. All complete afterwards.

Usage: script ROLE SEATS REQUESTS.
"""

import random
import sys

# First: it names the secret that roles need, and activates the overlay.
from tests.fastdeploy.drive_roles import BLOCK_SIZE, FakeWorker, Queue, make_manager, make_request  # isort: skip
from tests.fastdeploy.drive_resource_manager import Drive

LENGTH = 20


def drive_mixed(seats, num_requests):
    drive = Drive(random.Random(1), make_manager(300, 0, "write_through", seats=seats, max_tokens=LENGTH * seats))
    for number in range(num_requests):
        drive.add(f"r{number}", [number + 1] * LENGTH, 10)
    drive.step(lose="before put")
    assert (drive.num_lost, len(drive.manager.running)) == (1, seats)
    drive.run_dry()
    assert all(drive.manager.stop_flags)
    return drive.finished, drive.preempted


def drive_prefill(seats, num_requests):
    manager = make_manager(300, 0, "write_through", seats=seats, max_tokens=LENGTH * seats, role="prefill")
    worker, queue, preempted = FakeWorker(BLOCK_SIZE), Queue(), 0
    for number in range(num_requests):
        request = make_request(f"r{number}", [number + 1] * LENGTH)
        request.disaggregate_info = {"prefill_ip": "p", "prefill_connector_port": 1}
        assert manager.preallocate_resource_in_p(request)
        manager.add_request_in_p([request])
    assert len(manager.schedule()[0]) == seats, "and nothing takes them to the worker"
    finished = set()
    for _ in range(10):
        tasks, _ = manager.schedule()
        if tasks:
            queue.put_tasks((tasks, len(tasks)))
            for request_id in worker.receive(queue.take())[0]:
                preempted += 1
                manager.reschedule_preempt_task(request_id)
        for request_id in worker.step():
            worker.stop(request_id)
            manager.finish_requests([request_id])
            finished.add(request_id)
        manager.cache_manager.check()
    assert all(manager.stop_flags)
    return len(finished), preempted


if __name__ == "__main__":
    drive = {"mixed": drive_mixed, "prefill": drive_prefill}[sys.argv[1]]
    finished, preempted = drive(*map(int, sys.argv[2:]))
    print(f"RESULT finished={finished} preempted={preempted}")
