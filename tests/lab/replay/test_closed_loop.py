"""Arrival in simulated time: nobody asks the next question before the last answer is there."""

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.lab.replay.closed_loop import ClosedLoop
from fastdeploy_kvcache_v1.lab.replay.driver import ReplayOptions
from fastdeploy_kvcache_v1.lab.replay.trace import TraceRequest, read_trace

from .conftest import traffic

STEP_MS = 10.0


def turn(line: int, at: float, *ids: int, out: int = 5, after: int | None = None, delay: float | None = None):
    return TraceRequest(
        line=line,
        timestamp_ms=at,
        input_length=64 * len(ids),
        output_length=out,
        hash_ids=ids,
        tokens_per_id=64,
        after=after,
        delay_ms=delay,
    )


class Watched(ClosedLoop):
    """Notes when each line came in and ended."""

    def __init__(self, *, blocks: int = 100, host_blocks: int = 0, window: int = 32, **options) -> None:
        config = KVCacheConfig(blocks, host_blocks, write_policy=WritePolicy.WRITE_THROUGH, max_queued_events=0)
        super().__init__(ReplayOptions(config, window, closed_loop=True, step_ms=STEP_MS, verify=True, **options))
        self.begun: dict[int, float] = {}
        self.ended: dict[int, float] = {}

    def _try_admit(self, opened):
        admitted = super()._try_admit(opened)
        if admitted:
            self.begun[opened.request.line] = self.now_ms
        return admitted

    def _ended(self, request, ended_ms):
        self.ended[request.line] = ended_ms
        super()._ended(request, ended_ms)


def played(*requests: TraceRequest, **options) -> Watched:
    replay = Watched(**options)
    replay.run(iter(requests))
    return replay


def test_a_request_runs_one_step_per_output_token():
    done = played(turn(1, 0, 1, out=5), turn(2, 7, 2, out=0), turn(3, 900, 3, after=1))
    assert done.begun == {1: 0, 2: 10, 3: 900}
    assert done.ended == {1: 50, 2: 20, 3: 950}
    assert done.num_steps == 8, "one for each time at which something happens, and one for the last copies"


def test_the_next_turn_comes_its_delay_after_the_end():
    done = played(turn(1, 0, 1, out=30), turn(2, 40, 1, 2, after=1, delay=25), turn(3, 60, 1, 2, 3, after=2, delay=0))
    assert done.begun == {1: 0, 2: 325, 3: 375}
    assert done.num_device_hit_tokens == 64 + 128


def test_without_delays_or_waiting_requests_arrive_at_the_traces_times():
    requests = [turn(1, 20, 1), turn(2, 500, 1, 2, after=1), turn(3, 1_230, 1, 2, 3, after=2), turn(4, 510, 9)]
    done = played(*requests)
    assert done.begun == {request.line: request.timestamp_ms for request in requests}


def test_a_turn_that_had_to_wait_delays_the_turns_after_it():
    requests = [turn(1, 0, 1, out=20), turn(2, 5, 2, out=20), turn(3, 300, 2, 3, after=2)]
    done = played(*requests, window=1)
    assert done.begun == {1: 0, 2: 200, 3: 200 + 200 + (300 - 5 - 200)}


def test_nobody_ends_early_to_make_room():
    done = played(turn(1, 0, 1, 2, 3, out=40), turn(2, 10, 4, 5, out=1), turn(3, 20, 6, after=2, delay=0), blocks=4)
    assert done.begun == {1: 0, 2: 400, 3: 410}
    assert done.num_no_space > 0


def test_the_turn_after_one_that_no_tier_holds_comes_all_the_same():
    done = played(turn(1, 30, *range(5)), turn(2, 90, 7, after=1, delay=15), blocks=4)
    assert (done.begun, done.num_too_long) == ({2: 45}, 1)


def test_two_turns_may_follow_the_same_one():
    done = played(turn(1, 0, 1), turn(2, 100, 1, 2, after=1), turn(3, 130, 1, 3, after=1))
    assert done.begun == {1: 0, 2: 100, 3: 130}


def test_a_trace_without_sessions_is_refused():
    with pytest.raises(ConfigError, match="--closed-loop needs sessions"):
        played(turn(1, 0, 1), turn(2, 5, 2))


@pytest.mark.parametrize("outputs", [False, True])
def test_every_block_holds_what_it_should_and_every_run_is_the_same(tmp_path, outputs):
    sessions = traffic(tmp_path / "trace", "chat", 240)
    runs = []
    for _ in range(2):
        done = Watched(blocks=330, host_blocks=100, outputs=outputs)
        done.run(read_trace(sessions))
        assert len(done.request_seconds) == 240
        counters = done.manager.stats().counters
        assert (done.num_swap_out_copies, done.num_swap_in_copies) == (
            counters.swap_out_blocks,
            counters.swap_in_blocks,
        )
        assert counters.swap_out_blocks > 0
        runs.append((done.begun, done.ended, done.num_device_hit_tokens, done.num_host_hit_tokens, done.num_steps))
    assert runs[0] == runs[1]
    assert done.num_no_space > 10
    by_session = {}
    for request in read_trace(sessions):
        if request.after is not None:
            assert done.begun[request.line] >= done.ended[request.after] + request.delay_ms
            by_session[request.line] = request.after
    assert len(by_session) > 80


def test_the_manager_knows_so_many_of_those_that_wait(monkeypatch):
    replay = Watched(window=1, waiting=2)
    told, plain = [], replay.manager.expect

    def expect(line):
        told.append(len(line))
        plain(line)

    monkeypatch.setattr(replay.manager, "expect", expect)
    replay.run(iter([turn(line, 0, line, out=3) for line in range(1, 6)] + [turn(6, 0, 9, after=5)]))
    assert max(told) == 2
    assert len(replay.request_seconds) == 6
