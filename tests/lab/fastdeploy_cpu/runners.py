"""Runners with a real model, caches and copies, and what their tests share. The reference is the model alone."""

import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import numpy as np
import pytest

from fastdeploy_kvcache_v1.contract.messages import SWAP_IN, SWAP_OUT, BlockCopies, SwapStep
from fastdeploy_kvcache_v1.contract.swap_message import encode
from fastdeploy_kvcache_v1.errors import ModelError
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.runner import CpuModelRunner, RunnerConfig, stats_file
from fastdeploy_kvcache_v1.lab.model import load_model, load_model_config
from fastdeploy_kvcache_v1.lab.model.copy_faults import VARIABLE
from fastdeploy_kvcache_v1.lab.model.directory import write_random_directory
from fastdeploy_kvcache_v1.lab.model.ranks import ONE_RANK
from fastdeploy_kvcache_v1.lab.model.step import SequenceSlice

from .host_tasks import ABORT, other, prefill

BLOCK = 8
PROMPT = list(range(20, 20 + 21))
LONG = PROMPT[:16] + list(range(50, 66))
"""Four blocks, of which PROMPT has the first two."""


def injected(copy_faults):
    """For runners that are made meanwhile."""
    return patch.dict(os.environ, {VARIABLE: copy_faults})


def start_runner(model, directory, *, host_blocks=8, keep_host_memory=False, sends=True, **parts):
    config = RunnerConfig(Path(model), BLOCK, host_blocks, "float32", keep_host_memory)
    told = []
    sender = SimpleNamespace(send=lambda rows, *, running: told.append((list(rows), running))) if sends else None
    runner = CpuModelRunner(
        config, sender, stats_file=stats_file(directory, parts.get("ranks", ONE_RANK).rank), **parts
    )
    runner.load_weights()
    runner.create_caches(16)
    runner.messages = told
    return runner


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    return write_random_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def expected(model):
    return decode_alone(model, PROMPT, 6)


@pytest.fixture
def make_runner(model, tmp_path):
    runners = []

    def make(copy_faults="", path=model, **parts):
        with injected(copy_faults):
            runners.append(start_runner(path, tmp_path, **parts))
        return runners[-1]

    yield make
    for runner in runners:
        runner.drop_caches()
        runner._controller.free()  # what it keeps


def decode_alone(model, prompt, count):
    """Greedy continuation by the model, nothing cached."""
    config = load_model_config(model)
    backend = config.cache_backend(block_size=BLOCK, dtype="float32")
    alone = load_model(model, config, backend.layout, ONE_RANK)
    tokens = list(prompt)
    for _ in range(count):
        caches = list(backend.create_kv_cache(16).values())
        ((logits,),) = alone.forward([SequenceSlice(np.array(tokens), 0, range(16))], caches)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def run(runner, steps, *, rows=1, row=0):
    """What is said of one of the rows."""
    first = len(runner.messages)
    for _ in range(steps):
        runner.execute(rows)
    return [said[row] for said, _ in runner.messages[first:]]


def tokens(said):
    return [token for token in said if token >= 0]


def with_swaps(task, number, *, swap_out=((), ()), swap_in=((), ()), previous=-1):
    step = SwapStep.of(number, BlockCopies(*SWAP_OUT, *swap_out), BlockCopies(*SWAP_IN, *swap_in))
    setattr(task, SWAP_ATTRIBUTE, encode(step, previous))
    return task


def back_up(runner):
    """Of PROMPT the two full blocks are in host slots 3 and 4 afterwards, and nowhere else."""
    for task in (
        prefill(0, "a", PROMPT, [0, 1, 2]),
        with_swaps(other(ABORT, 0, "a"), 0, swap_out=((0, 1), (3, 4))),
        prefill(0, "b", [50] * 24, [0, 1, 2]),
        other(ABORT, 0, "b"),
    ):
        runner.insert_tasks([task])
        run(runner, 1)


def swap_out_and_in(runner):
    """They are read back into other slots, for another request."""
    back_up(runner)
    task = prefill(0, "c", PROMPT, [7, 5, 6, 8], start=16)
    runner.insert_tasks([with_swaps(task, 1, swap_in=((3, 4), (7, 5)), previous=0)])


def fail_next_pass(runner):
    """Halfway: the blocks hold something, and not what they should."""
    forward = runner._computing.forward

    def failing(sequences, caches, before_layer):
        runner._computing.forward = forward
        forward(sequences, caches, before_layer)
        for cache in caches:
            for sequence in sequences:
                first, end = sequence.start // BLOCK, -(-(sequence.start + len(sequence.token_ids)) // BLOCK)
                for slot in list(sequence.block_table)[first:end]:
                    cache[int(slot)] = 7.0
        raise ModelError("the pass broke")

    runner._computing.forward = failing
