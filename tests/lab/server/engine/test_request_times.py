"""Where the time of a request went, on a clock that the test turns."""

from dataclasses import replace

from fastdeploy_kvcache_v1.lab.server.engine.request_times import MOST_KEPT
from tests.lab.server.engine.storage_server import HostTierServer
from tests.lab.server.harness import Harness, small


class Timed:
    """An engine whose steps take as long as the test says."""

    def __init__(self, **options):
        self.now = 100.0
        self.harness = Harness(small(), clock=lambda: self.now, **options)

    def submit(self, name, prompt, count):
        sink = lambda event: None  # noqa: E731
        generation = self.harness.generation(name, prompt, count, sink)
        generation.submitted_at = self.now
        self.harness.core.submit(generation)

    def step(self, seconds, copies_s=0.0):
        self.harness.core.step()
        (batch,) = self.harness.sent
        self.harness.sent.clear()
        result = self.harness.worker.run(batch)
        self.now += seconds
        report = replace(result.report, exposed_wait_since_last_s=copies_s)
        self.harness.core.on_step_result(replace(result, report=report))

    def reports(self, limit=10):
        return {each.id: each for each in self.harness.core.requests(limit)}


def test_the_times_of_a_request_add_up_to_its_first_token():
    timed = Timed(max_num_batched_tokens=8, max_num_seqs=1)
    timed.submit("first", range(12), 3)
    timed.submit("second", range(40, 44), 1)
    timed.now += 1
    timed.step(4, copies_s=3)
    report = timed.reports()["first"]
    assert (report.state, report.queue_s, report.first_token_s, report.total_s) == ("running", 1, None, 5)
    timed.step(2)
    timed.step(8)
    first, second = timed.reports()["first"], timed.reports()["second"]
    assert (first.queue_s, first.storage_s, first.copies_s, first.prefill_s, first.first_token_s) == (1, 0, 3, 3, 7)
    assert (second.state, second.queue_s, second.prefill_s, second.cached_tokens) == ("waiting", None, 0, None)
    timed.step(1)
    timed.step(1)
    first, second = timed.reports()["first"], timed.reports()["second"]
    assert (first.state, first.output_tokens, first.total_s, first.prefill_s) == ("finished", 3, 16, 3)
    assert (second.queue_s, second.first_token_s, second.total_s) == (16, 17, 17)


def test_a_wait_for_stored_blocks_is_no_time_in_the_queue():
    prompt = list(range(30))
    first = HostTierServer()
    first.ask("first", prompt)
    server = HostTierServer(stored=first.store.values, clock=lambda: server.clock.now if made else 0.0)
    made = True
    generation = server.harness.generation("second", prompt, 1, lambda event: None)
    generation.submitted_at = server.clock.now
    server.core.submit(generation)
    server.send()
    server.clock.now += 0.25
    server.settle()
    (report,) = server.core.requests(1)
    assert (report.storage_s, report.queue_s, report.cached_tokens) == (0.25, 0, 28)


def test_open_requests_come_first_and_the_latest_ended_ones_next():
    timed = Timed()
    for name in ("a", "b", "c"):
        timed.submit(name, range(4), 1)
        timed.step(1)
    timed.submit("open", range(4), 9)
    timed.submit("gone", range(4), 9)
    timed.harness.core.abort("gone")
    assert list(timed.reports()) == ["open", "gone", "c", "b", "a"]
    assert list(timed.reports(3)) == ["open", "gone", "c"]
    assert [each.state for each in timed.reports(3).values()] == ["waiting", "aborted", "finished"]
    assert timed.reports(0) == {}


def test_old_requests_are_forgotten():
    timed = Timed()
    for number in range(MOST_KEPT + 1):
        timed.submit(f"{number}", range(4), 1)
        timed.step(1)
    kept = list(timed.reports(2 * MOST_KEPT))
    assert (len(kept), kept[0], kept[-1]) == (MOST_KEPT, f"{MOST_KEPT}", "1")
