"""The runner with the real model, caches and copies; the host is a few tasks. The reference is the decoder alone."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import TransferError
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.batch_rows import FAILED, RELEASED
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.random_model import (
    write_random_model,
    write_random_weights,
)
from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.runner import CpuModelRunner, RunnerConfig, stats_file
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.weight_updates import CLEARED, NORMAL
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.metadata import EVICT, SWAP_IN, CacheSwapMetadata, SwapStep
from fastdeploy_kvcache_v1.model.config import load_model_config
from fastdeploy_kvcache_v1.swap_message import encode
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime

from .host_tasks import ABORT, DECODE, other, prefill

BLOCK = 8
PROMPT = list(range(20, 20 + 21))


class Messages:
    """Takes the place of the socket to the engine."""

    def __init__(self):
        self.sent = []

    def send(self, rows, *, running):
        self.sent.append((list(rows), running))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def make_runner(model, tmp_path):
    runners = []

    def make(copy_faults="", path=model, tell_copies=lambda report: None, storage=None, **options):
        config = RunnerConfig(
            Path(path), BLOCK, num_host_blocks=8, cache_dtype="float32", copy_faults=copy_faults, **options
        )
        runner = CpuModelRunner(config, Messages(), stats_directory=tmp_path, tell_copies=tell_copies, storage=storage)
        runner.load_weights()
        runner.create_caches(16)
        runner.messages = runner._sender.sent
        runners.append(runner)
        return runner

    yield make
    for runner in runners:
        runner.drop_caches()
        runner._controller.free()  # what it keeps


def decode_alone(model, prompt, count):
    """Greedy continuation by the decoder, nothing cached."""
    import paddle

    from fastdeploy_kvcache_v1.model.decoder import Decoder
    from fastdeploy_kvcache_v1.model.plan import SequenceSlice

    config = load_model_config(model)
    decoder = Decoder.load(model, config)
    tokens = list(prompt)
    for _ in range(count):
        shape = [16, config.num_kv_heads, BLOCK, config.head_dim]
        caches = [paddle.zeros(shape) for _ in range(2 * config.num_layers)]
        (logits,) = decoder.forward([SequenceSlice(np.array(tokens), 0, range(16))], caches)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def expected(model):
    return decode_alone(model, PROMPT, 6)


def run(runner, steps, rows=1):
    first = len(runner.messages)
    for _ in range(steps):
        runner.execute(rows)
    return [message[0][0] for message in runner.messages[first:]]


def with_swaps(task, number, *, evict=((), ()), swap_in=((), ()), previous=-1):
    step = SwapStep.of(number, CacheSwapMetadata(*EVICT, *evict), CacheSwapMetadata(*SWAP_IN, *swap_in))
    setattr(task, SWAP_ATTRIBUTE, encode(step, previous))
    return task


def test_whole_prompt(make_runner, expected):
    runner = make_runner()
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert run(runner, 6) == expected


def test_chunks_a_longer_table_and_an_abort(make_runner, expected):
    runner = make_runner()
    runner.insert_tasks([prefill(0, "a", PROMPT, range(2), end=16)])
    assert run(runner, 1) == [-1]
    assert not runner.not_need_stop()
    runner.insert_tasks([prefill(0, "a", PROMPT, range(3), start=16)])
    assert run(runner, 4) == expected[:4]
    assert not runner.not_need_stop()  # position 24 has no block
    runner.insert_tasks([other(DECODE, 0, "a", range(4))])
    assert run(runner, 2) == expected[4:]
    runner.insert_tasks([other(ABORT, 0, "a")])
    assert run(runner, 1) == [RELEASED]
    assert runner.messages[-1] == ([RELEASED], False)


def swap_out_and_in(runner):
    """Compute, back the two full blocks up, lose them, and read them back into other sequences for another request."""
    runner.insert_tasks([prefill(0, "a", PROMPT, [0, 1, 2])])
    run(runner, 1)
    runner.insert_tasks([with_swaps(other(ABORT, 0, "a"), 0, evict=((0, 1), (3, 4)))])
    run(runner, 1)
    runner.insert_tasks([prefill(0, "b", [50] * 24, [0, 1, 2])])
    run(runner, 1)
    runner.insert_tasks([other(ABORT, 0, "b")])
    run(runner, 1)
    task = prefill(0, "c", PROMPT, [7, 5, 6, 8], start=16)
    runner.insert_tasks([with_swaps(task, 1, swap_in=((3, 4), (7, 5)), previous=0)])


def test_blocks_go_to_the_host_and_back(make_runner, expected, tmp_path):
    runner = make_runner()
    swap_out_and_in(runner)
    assert run(runner, 6) == expected
    while runner.not_need_stop() and runner._steps.has_open_copies:
        runner.execute(1)
    copies = json.loads((tmp_path / stats_file(0)).read_text())
    assert [(copies[way]["blocks"], copies[way]["failures"]) for way in ("swap_out", "swap_in")] == [(2, 0), (2, 0)]


@pytest.mark.parametrize("faults", ['{"fail": {"input": "all"}}', '{"fail": {"output": "all"}}', '{"max_delay_ms": 5}'])
def test_a_failed_copy_costs_a_step_but_no_token(make_runner, expected, faults):
    runner = make_runner(faults)
    swap_out_and_in(runner)
    said = run(runner, 8)
    assert [token for token in said if token >= 0][:6] == expected


def test_a_sequence_that_cannot_be_computed_is_given_up(make_runner):
    runner = make_runner()
    runner.insert_tasks([prefill(0, "a", PROMPT, [0, 99, 2])])
    assert run(runner, 1) == [FAILED]
    assert not runner.not_need_stop()


def test_a_lost_batch_ends_the_worker(make_runner):
    runner = make_runner()
    with pytest.raises(TransferError, match="a batch was lost"):
        runner.insert_tasks([with_swaps(prefill(0, "a", PROMPT, range(5)), 4, evict=((9,), (0,)), previous=3)])


def test_sleeping_computes_nothing_and_new_weights_are_read(make_runner, tmp_path, expected):
    path = write_random_model(tmp_path / "model")
    runner = make_runner(path=path)
    runner.drop_weights()
    assert runner.is_sleeping
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert run(runner, 1) == []
    runner.drop_caches()
    write_random_weights(path, seed=1)
    runner.restore(weights=True, caches=True)
    assert not runner.is_sleeping
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert run(runner, 6) == decode_alone(path, PROMPT, 6) != expected


@pytest.mark.parametrize("keep", [True, False])
def test_host_memory_while_the_caches_are_away(make_runner, monkeypatch, expected, keep):
    freed, free_host = [], CpuRuntime.free_host
    monkeypatch.setattr(
        CpuRuntime, "free_host", lambda self, buffer: freed.append(buffer.nbytes) or free_host(self, buffer)
    )
    runner = make_runner(keep_host_memory=keep)
    swap_out_and_in(runner)
    runner.drop_caches()
    assert freed == ([] if keep else [8 * runner.block_bytes])
    runner.restore(weights=True, caches=True)
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert run(runner, 6) == expected


def test_weights_go_and_come_back(make_runner, tmp_path):
    """By the host's legacy API: sequences, and copies that wait, are forgotten; only the status is told."""
    path, told = write_random_model(tmp_path / "model"), []
    runner = make_runner(path=path)
    runner._tell_weights_status = lambda port, status: told.append((port, status, runner.is_sleeping))
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5))])
    assert len(run(runner, 2)) == 2
    runner.insert_tasks([with_swaps(prefill(1, "b", PROMPT, range(5, 10)), 0, swap_in=((3,), (5,)))])
    runner.clear_requests()
    runner.clear_parameters(17)
    assert not runner.not_need_stop()
    write_random_weights(path, seed=5)
    runner.clear_requests()
    runner.update_parameters(17)
    assert told == [(17, CLEARED, True), (17, NORMAL, False)]
    assert not runner.not_need_stop()
    assert len(runner.messages) == 2
    runner.insert_tasks([with_swaps(prefill(0, "a", PROMPT, range(5)), 7)])
    assert run(runner, 6) == decode_alone(path, PROMPT, 6)


def test_min_tokens_keeps_end_tokens_out(make_runner, expected):
    runner = make_runner()
    task = prefill(0, "a", PROMPT, range(5), min_tokens=6)
    task.eos_token_ids = [expected[2]]
    runner.insert_tasks([task])
    assert expected[2] not in run(runner, 6)


def test_passes_that_compute_prompts_are_timed(make_runner):
    """Not those that only decode, nor one that computes a sequence again because a copy failed."""
    reports = []
    runner = make_runner('{"fail": {"input": [0]}}', tell_copies=reports.append)
    runner.insert_tasks([prefill(0, "a", PROMPT, range(5), end=16), prefill(1, "b", PROMPT[:9], range(5, 8))])
    run(runner, 3, rows=2)
    runner.insert_tasks([with_swaps(other(DECODE, 1, "b", range(5, 8)), 0, evict=((5,), (2,)))])
    run(runner, 1, rows=2)
    again = prefill(2, "c", PROMPT, [9, 10, 11, 12], start=8)
    runner.insert_tasks([with_swaps(again, 1, swap_in=((2,), (9,)), previous=0)])
    run(runner, 1, rows=3)
    timed = [each for report in reports for each in report.prefills]
    assert [(each.num_tokens, each.num_positions) for each in timed] == [(16 + 9, (16**2 + 9**2) / 2)]
    assert timed[0].seconds > 0


def test_one_rank_times_passes_that_load_too(make_runner):
    """It knows how long it waited for its copies."""
    reports = []
    runner = make_runner(tell_copies=reports.append)
    swap_out_and_in(runner)
    run(runner, 2)
    timed = [prefill.num_tokens for report in reports for prefill in report.prefills]
    assert timed == [len(PROMPT), 24, len(PROMPT) - 16]


def test_storage_of_device_blocks_hears_of_passes(make_runner):
    reports = []
    storage = SimpleNamespace(
        uses_device_tier=True, host_trailer_bytes=0, host_is_shared=False, use=lambda _: None, let_go=lambda: True
    )
    runner = make_runner(tell_copies=reports.append, storage=storage)
    assert not runner.not_need_stop()
    assert (reports[-1].passes.step, reports[-1].passes.is_idle) == (-1, True)
    task = prefill(0, "a", PROMPT, range(4))
    setattr(task, SWAP_ATTRIBUTE, encode(SwapStep(0), -1))
    runner.insert_tasks([task])
    assert runner.not_need_stop()
    runner.execute(1)
    assert (reports[-1].passes.step, reports[-1].passes.is_idle) == (0, False), "the row goes on"
    runner.insert_tasks([other(ABORT, 0, "a")])
    runner.execute(1)
    assert not runner.not_need_stop()
    assert (reports[-1].passes.step, reports[-1].passes.is_idle) == (0, True)
