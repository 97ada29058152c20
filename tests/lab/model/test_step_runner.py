"""One step in the worker, with real copies and a forward pass that only looks: who is dropped when a copy fails."""

import threading

import numpy as np
import paddle  # noqa: F401  # at its import it asks the system for its libraries, which no test may
import pytest

from fastdeploy_kvcache_v1.attention.layouts import GQACacheBackend
from fastdeploy_kvcache_v1.contract.messages import SWAP_IN, SWAP_OUT, BatchRequest, BlockCopies, SwapStep
from fastdeploy_kvcache_v1.errors import CacheStateError, ConfigError
from fastdeploy_kvcache_v1.lab.model.copy_faults import make_runtime
from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.lab.model.step import StepTask
from fastdeploy_kvcache_v1.lab.model.step_runner import StepRunner
from fastdeploy_kvcache_v1.worker.cache_controller import CacheController
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime

LAYERS = 2
BLOCK = 4
VOCAB = 50
GREEDY = SamplingParams(temperature=0)


class LookingForward:
    """Waits for the layers as a model does, keeps what it was asked, and "predicts" the position of the next token."""

    def __init__(self):
        self.calls = []
        self.layers = []

    def __call__(self, sequences, caches, before_layer):
        self.calls.append([(slice_.start, list(slice_.token_ids), list(slice_.block_table)) for slice_ in sequences])
        for layer in range(LAYERS):
            before_layer(layer)
            self.layers.append(layer)
        return [np.eye(VOCAB, dtype=np.float32)[slice_.end : slice_.end + slice_.num_logits] for slice_ in sequences]


class Worker:
    def __init__(self, runtime, forward=None, layer_timeout_s=30.0):
        self.forward = forward or LookingForward()
        self.controller = CacheController(
            GQACacheBackend(LAYERS, 1, 4, BLOCK, "float32"), runtime=runtime, layer_timeout_s=layer_timeout_s
        )
        caches = self.controller.initialize_kv_cache(8, 8)
        self.runtime = runtime
        self.num_signs = 0
        self.runner = StepRunner(
            self.forward,
            self.controller,
            caches,
            block_size=BLOCK,
            layer_computed=self.give_sign,
        )

    def give_sign(self):
        self.num_signs += 1

    def close(self):
        self.controller.transfers.drain()
        self.controller.free()


@pytest.fixture
def start(request):
    def start_worker(runtime=None, **options):
        worker = Worker(runtime or CpuRuntime(), **options)
        request.addfinalizer(worker.close)
        return worker

    return start_worker


def task(name, table, start=0, tokens=1, needs_logits=True):
    return StepTask(name, list(range(tokens)), start, list(table), needs_logits, GREEDY)


def swap_in(step, *slots):
    """Host slots to the device slots of the same numbers."""
    return SwapStep(step, (BlockCopies(*SWAP_IN, slots, slots),))


def swap_out(step, *slots):
    return SwapStep(step, (BlockCopies(*SWAP_OUT, slots, slots),))


def outcome(worker, result):
    """Tokens, who is to be retried, and of each copy how many blocks it has brought, or the slots that it has not."""
    transfers = list(result.report.transfers)
    while worker.runner.has_open_copies:
        transfers += worker.runner.take_report().transfers
    assert result.errors == {}
    tokens = {name: token for name, (token,) in result.tokens.items()}
    return tokens, set(result.retry), [each.num_blocks if each.ok else each.target_slots for each in transfers]


STEPS = {
    # law: faults of the copies, requests, swap steps; tokens, who is dropped, copies as in `outcome`, sizes of passes
    "tokens come only from tasks that reach their end": (
        *("", [task("a", [0, 1], start=4, tokens=3), task("b", [2], tokens=4, needs_logits=False)], []),
        *({"a": 7}, set(), [], [2]),
    ),
    "forward waits for every layer and the copies are reported": (
        *("", [task("a", [3, 4], start=4)], [swap_in(0, 3)]),
        *({"a": 5}, set(), [1], [1]),
    ),
    "a batch without requests only copies": ("", [], [swap_out(0, 1, 2)], {}, set(), [2], []),
    "a failed swap-in drops only the requests that read its targets": (
        '{"fail": {"swap_in": [1]}}',
        [task("reads", [3, 4], start=4), task("other", [5]), task("shares", [3, 6], start=4)],
        [swap_in(0, 3)],
        *({"other": 1}, {"reads", "shares"}, [(3,)], [3, 1]),
    ),
    "one that nobody reads drops nobody": (  # once more, without waiting for the copy
        *('{"fail": {"swap_in": [1]}}', [task("a", [4]), task("b", [5])], [swap_in(0, 3)]),
        *({"a": 1, "b": 1}, set(), [(3,)], [2, 2]),
    ),
    "a failed backup disturbs nobody": (
        *('{"fail": {"swap_out": "all"}}', [task("a", [3, 4], start=4)], [swap_out(0, 3)]),
        *({"a": 5}, set(), [(3,)], [1]),
    ),
    "a slot that the second step took away may be written": (  # only slots of the last step are off limits
        *("", [task("a", [3], tokens=4)], [swap_in(0, 3), swap_out(1, 3)]),
        *({"a": 4}, set(), [1, 1], [1]),
    ),
}


@pytest.mark.parametrize("law", STEPS)
def test_law_of_a_step(start, law):
    faults, tasks, steps, *expected, passes = STEPS[law]
    worker = start(make_runtime(faults) if faults else None)
    assert [*outcome(worker, worker.runner.run(BatchRequest(tasks, swap_steps=steps)))] == expected
    assert [len(call) for call in worker.forward.calls] == passes


def test_late_swap_in_drops_the_request_and_the_next_step_goes_on(start):
    gate = threading.Event()
    worker = start(CpuRuntime(delay=lambda stream: gate.wait()), layer_timeout_s=0.05)
    try:
        result = worker.runner.run(
            BatchRequest([task("late", [3, 4], start=4), task("other", [5])], swap_steps=[swap_in(0, 3)])
        )
        assert set(result.retry) == {"late"}
        assert "did not arrive within 0.05 s" in result.retry["late"]
        assert result.tokens == {"other": (1,)}
        assert [each.target_slots for each in result.report.transfers] == [(3,)]
        assert worker.runner.run(BatchRequest([task("next", [6])])).tokens == {"next": (1,)}
        assert not worker.runner.has_open_copies
    finally:
        gate.set()


def test_pass_that_fails_for_everybody_is_not_repeated(start, monkeypatch):
    """Nothing was lost: the slot that is written still waits to be copied out. So nobody can be told apart."""
    gate = threading.Event()
    worker = start(CpuRuntime(delay=lambda stream: gate.wait()), layer_timeout_s=0.05)
    passes = []
    before_compute = worker.controller.transfers.before_compute

    def count_passes(*slots, counter):
        passes.append(slots)
        assert len(passes) < 3, "the same pass is tried for ever"
        before_compute(*slots, counter=counter)

    monkeypatch.setattr(worker.controller.transfers, "before_compute", count_passes)
    try:
        result = worker.runner.run(BatchRequest([task("writes", [3]), task("other", [5])], swap_steps=[swap_out(0, 3)]))
        assert (set(result.retry), result.tokens, result.errors) == ({"writes", "other"}, {}, {})
        assert passes == [([3, 5], [3, 5])]
    finally:
        gate.set()


def test_forward_waits_layer_by_layer_for_the_last_of_two_steps(start):
    """The first step's copies are waited for before; else the last step's would be, and with them no overlap."""
    gate, copies, looks = threading.Event(), [], LookingForward()

    def forward(sequences, caches, before_layer):
        return looks(sequences, caches, lambda layer: before_layer(layer) or gate.set())

    def hold_the_last_layer_of_the_second_step(stream):
        copies.append(stream)
        if len(copies) == 2 * LAYERS:
            assert gate.wait(10)

    worker = start(CpuRuntime(delay=hold_the_last_layer_of_the_second_step), forward=forward, layer_timeout_s=5)
    batch = BatchRequest([task("a", [3, 4, 5], start=8)], swap_steps=[swap_in(0, 3), swap_in(1, 4)])
    result = worker.runner.run(batch)
    assert (result.tokens, result.retry, result.errors) == ({"a": (9,)}, {}, {})
    assert len(copies) == 2 * LAYERS
    assert worker.num_signs == LAYERS, "a sign of life for each layer"


def test_slot_of_a_failed_swap_in_fails_its_readers_until_it_is_written(start):
    worker = start(make_runtime('{"fail": {"swap_in": [0]}}'))
    worker.runner.run(BatchRequest(swap_steps=[swap_in(0, 3)]))
    worker.controller.transfers.drain()
    result = worker.runner.run(BatchRequest([task("reads", [3, 4], start=4), task("other", [5])]))
    assert (set(result.retry), result.tokens) == ({"reads"}, {"other": (1,)})
    assert worker.runner.run(BatchRequest([task("writes", [3], tokens=4)])).tokens == {"writes": (4,)}
    assert worker.runner.run(BatchRequest([task("reads", [3, 4], start=4)])).tokens == {"reads": (5,)}


def test_bug_in_the_forward_fails_the_requests_and_spares_the_worker(start, caplog):
    def broken(sequences, caches, before_layer):
        raise ZeroDivisionError("a bug")

    worker = start(forward=broken)
    result = worker.runner.run(BatchRequest([task("a", [0])]))
    assert result.errors == {"a": "internal error: ZeroDivisionError('a bug')"}
    assert "Traceback" in caplog.text


def test_logits_that_are_not_finite_fail_only_their_request(start):
    def forward(sequences, caches, before_layer):
        return [np.full((1, VOCAB), np.nan if slice_.start else 0.0, dtype=np.float32) for slice_ in sequences]

    worker = start(forward=forward)
    result = worker.runner.run(BatchRequest([task("good", [0]), task("bad", [1], start=1)]))
    assert result.tokens == {"good": (0,)}
    assert set(result.errors) == {"bad"}


def test_steps_out_of_order_are_a_bug_nobody_survives(start):
    worker = start()
    worker.runner.run(BatchRequest(swap_steps=[swap_out(5, 1)]))
    with pytest.raises(CacheStateError):
        worker.runner.run(BatchRequest(swap_steps=[swap_out(5, 2)]))


@pytest.mark.parametrize("faults", ["{", "[1]", '{"max_delay": 3}'])
def test_descriptions_of_faults_are_checked(faults):
    with pytest.raises(ConfigError, match="FASTDEPLOY_KVCACHE_COPY_FAULTS"):
        make_runtime(faults)
