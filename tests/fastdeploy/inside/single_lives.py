"""FastDeploy's real ResourceManagerV1 over our adapter, in scenes of a few requests."""

import random
from concurrent.futures import Future

# First: it names the secret that roles need, and activates the overlay.
from tests.fastdeploy.drive_roles import BLOCK_SIZE, FakeWorker, Queue, make_manager, make_request  # isort: skip
import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from tests.fastdeploy.drive_resource_manager import Drive

NUM_PROMPTS = 16
LENGTH = 20


def make_drive(*sizes, **options):
    return Drive(random.Random(1), make_manager(*sizes, "write_through", **options))


class Chunks:
    """What of which prompts is in the batches of a manager."""

    def __init__(self, manager):
        self.seen, self._schedule = [], manager.schedule
        manager.schedule = self._counted

    def _counted(self):
        tasks, errors = self._schedule()
        for task in tasks:
            if task.task_type.name == "PREFILL":
                self.seen.append((task.request_id, task.prefill_start_index, task.prefill_end_index))
        return tasks, errors


def computed_tokens(prompts, budget, worth_tokens):
    """Prompt tokens of all batches; in the end everything was served, in the order in which it came."""
    drive = make_drive(4000, 0, seats=NUM_PROMPTS, max_tokens=budget)
    drive.cache._batch.prefills._worth_tokens = worth_tokens
    chunks = Chunks(drive.manager)
    for index, prompt in enumerate(prompts):
        drive.add(f"r{index}", prompt, 4)
    drive.run_dry()
    drive.cache.manager.check_idle()
    started = dict.fromkeys(name for name, _, _ in chunks.seen)
    assert list(started) == [f"r{index}" for index in range(len(prompts))], "nobody is passed for ever"
    assert len({tuple(output) for output in drive.outputs.values()}) == len({tuple(prompt) for prompt in prompts})
    return sum(end - start for _, start, end in chunks.seen)


EQUAL = list(range(1, 507))
SHARED = [[*EQUAL[:450], *range(index, index + 50)] for index in range(NUM_PROMPTS)]


@pytest.mark.parametrize("budget", [128, 16384])
@pytest.mark.parametrize(
    ("prompts", "most"), [([EQUAL] * NUM_PROMPTS, 1.1 * 506), (SHARED, 500 + 15 * (50 + 8))], ids=["equal", "shared"]
)
def test_equal_cold_prompts_are_computed_once(prompts, most, budget):
    waiting, alone = (computed_tokens(prompts, budget, worth) for worth in (256, 0))
    assert waiting <= most
    assert alone > (waiting if budget == 128 else 3 * waiting)


@pytest.mark.parametrize(("seats", "num_requests"), [(1, 2), (6, 9)])
def test_a_lost_batch_had_a_request_for_every_seat(seats, num_requests):
    drive = make_drive(300, 0, seats=seats, max_tokens=LENGTH * seats)
    for number in range(num_requests):
        drive.add(f"r{number}", [number + 1] * LENGTH, 10)
    drive.step(lose="before put")
    assert (drive.num_lost, len(drive.manager.running)) == (1, seats)
    drive.run_dry()
    assert all(drive.manager.stop_flags)
    assert (drive.finished, drive.preempted) == (num_requests, seats)


@pytest.mark.parametrize("seats", [1, 6])
def test_a_lost_batch_of_prefill_had_a_request_for_every_seat(seats):
    manager = make_manager(300, 0, "write_through", seats=seats, max_tokens=LENGTH * seats, role="prefill")
    worker, queue, preempted, finished = FakeWorker(BLOCK_SIZE), Queue(), 0, set()
    for number in range(seats):
        request = make_request(f"r{number}", [number + 1] * LENGTH)
        request.disaggregate_info = {"prefill_ip": "p", "prefill_connector_port": 1}
        assert manager.preallocate_resource_in_p(request)
        manager.add_request_in_p([request])
    assert len(manager.schedule()[0]) == seats, "and nothing takes them to the worker"
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
    assert (len(finished), preempted) == (seats, seats)


def test_only_a_release_that_can_disable_chunks_cuts_no_prompt(monkeypatch):
    """What latent attention needs, which is refused in other releases."""
    monkeypatch.setenv("FD_DISABLE_CHUNKED_PREFILL", "1")
    drive, lengths = make_drive(80, 0, caching=False), (40, 40, 24, 64, 1, 63)
    chunks = Chunks(drive.manager)
    for number, length in enumerate(lengths):
        drive.add(f"r{number}", [number + 1] * length, 4)
    drive.run_dry()
    assert drive.finished == len(lengths)
    is_cut = any((start, end) != (0, lengths[int(name[1:])]) for name, start, end in chunks.seen)
    assert is_cut != overlay.active().table.capabilities.disables_chunked_prefill


def run_until_running(drive, request_id):
    while request_id not in [each.request_id for each in drive.manager.running]:
        drive.step()


def test_a_lost_batch_takes_no_request_whose_id_was_once_aborted():
    """A request ends while its abortion is on its way, its id comes again: 2.5 keeps that id."""
    drive = make_drive(40, 0)
    manager = drive.manager
    drive.add("r", [1] * LENGTH, 60)
    run_until_running(drive, "r")
    manager.add_abort_req_ids("r")
    while "r" not in manager.to_be_aborted_req_id_set:
        manager.schedule()
    manager.cache_manager.transit.sent()  # the worker has it
    drive.finish("r")  # its last token was sent before
    drive.add("r", [2] * LENGTH, 60)
    run_until_running(drive, "r")
    drive.add("s", [3] * LENGTH, 3)
    while not drive.num_lost:
        drive.step(lose="before put")
    manager.cache_manager.transit.recover(manager)
    assert [each.request_id for each in manager.running] == ["r"]
    drive.run_dry()
    manager.cache_manager.manager.check_idle()
    assert drive.finished == 3


def test_a_request_that_was_passed_over_when_schedule_raised_still_waits():
    """It is passed over because it is not complete yet."""
    drive, loaded = make_drive(60, 0, caching=False), Future()
    manager = drive.manager
    manager.apply_async_preprocess = lambda request: request.async_process_futures.extend(
        [loaded] if request.request_id == "a" else []
    )
    for name in "abcd":
        drive.add(name, [ord(name)] * LENGTH, 3)
    while not drive.num_lost:
        drive.step(lose="schedule")
    assert "a" in [each.request_id for each in manager.waiting]
    loaded.set_result(None)
    drive.run_dry()
    assert drive.finished == 4
