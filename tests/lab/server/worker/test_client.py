"""The engine's end of the worker processes: what goes wrong before, between and instead of answers, on any rank."""

import errno
import os
import pickle
import socket
import tempfile
import threading
import time
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import SWAP_IN, BatchRequest, BlockCopies, SwapStep
from fastdeploy_kvcache_v1.errors import ConfigError, WorkerDiedError
from fastdeploy_kvcache_v1.lab.model import copy_faults
from fastdeploy_kvcache_v1.lab.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.lab.model.step import LayerComputed, StepTask
from fastdeploy_kvcache_v1.lab.server.settings import ServerConfig
from fastdeploy_kvcache_v1.lab.server.worker import client, rank_process
from fastdeploy_kvcache_v1.lab.server.worker.client import ProcessWorkerClient, StartInterruptedError
from fastdeploy_kvcache_v1.lab.server.worker.messages import WorkerLaunch
from fastdeploy_kvcache_v1.storage.settings import Prefetch, StorageSettings
from tests.storage.values import file_options

ONE = ServerConfig(cache=KVCacheConfig(8, 4, block_size=16), max_model_len=128)
TWO = replace(ONE, tensor_parallel_size=2)
BATCH = BatchRequest([StepTask("r", [1, 2, 3], 0, [5], True, SamplingParams())])


@pytest.fixture
def temp_dir(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="kv-") as path:  # short, for unix sockets
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield path


class Listener:
    def __init__(self, client):
        self.answers, self.reasons, self.num_signs = [], [], 0
        self.answered, self.died = threading.Semaphore(0), threading.Event()
        self.on_answer = lambda: None
        client.listen(self.on_message, self.on_death)

    def on_message(self, rank, message):
        if isinstance(message, LayerComputed):
            self.num_signs += 1
            return
        self.answers.append((rank, message))
        self.answered.release()
        self.on_answer()

    def on_death(self, reason):
        self.reasons.append(reason)
        self.died.set()


@contextmanager
def running(config, **options):
    """A client, its listener, and the processes by rank, which are gone at the end."""
    client = ProcessWorkerClient(config, **options)
    processes = [psutil.Process(pid) for pid in client.pids]
    try:
        yield client, Listener(client), processes
    finally:
        client.close()
    assert not any(process.is_running() for process in processes)


def stored_in(directory):
    return StorageSettings("file", file_options(Path(directory, "store")), prefetch=Prefetch.BEST_EFFORT)


def name_of(rank, config):
    return "the worker process" + ("" if config is ONE else f" of rank {rank}")


over_ranks = pytest.mark.parametrize(("config", "rank"), [(ONE, 0), (TWO, 0), (TWO, 1)], ids=["one", "first", "second"])


@pytest.mark.parametrize(
    ("owner", "name", "error", "message"),
    [
        (tempfile, "mkdtemp", OSError, "cannot make a temporary directory: "),
        (socket.socket, "bind", OSError, "cannot make the socket "),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(temp_dir, monkeypatch, owner, name, error, message):
    def no_space(*arguments, **options):
        raise error(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(owner, name, no_space)
    with pytest.raises(ConfigError, match=f"{message}.*No space left on device"):
        ProcessWorkerClient(replace(ONE, storage=stored_in(temp_dir)))
    assert os.listdir(temp_dir) == []


@pytest.mark.process
def test_every_rank_answers_with_the_same_token_and_no_name_is_left(temp_dir):
    """Names are gone once the server is ready: a SIGKILL leaves nothing behind."""
    with running(replace(TWO, storage=stored_in(temp_dir))) as (client, listener, _):
        assert os.listdir(temp_dir) == []
        client.send(BATCH)
        for _ in range(2):
            assert listener.answered.acquire(timeout=60)
        assert sorted(rank for rank, _ in listener.answers) == [0, 1]
        first, second = (answer.tokens for _, answer in listener.answers)
        assert first == second
        assert list(first) == ["r"]
    assert listener.reasons == []


@pytest.mark.process
def test_long_step_shows_between_its_layers_that_it_goes_on(temp_dir, monkeypatch):
    monkeypatch.setenv(copy_faults.VARIABLE, '{"delay_ms": {"swap_in": 1100}}')
    copies = SwapStep(0, (BlockCopies(*SWAP_IN, (0,), (5,)),))
    with running(ONE) as (client, listener, _):
        task = StepTask("r", [1, 2, 3], ONE.cache.block_size, [5, 6], True, SamplingParams())
        client.send(BatchRequest([task], [copies]))
        assert listener.answered.acquire(timeout=60)
        assert listener.num_signs > 1


@pytest.mark.process
def test_unreadable_answer_ends_the_worker_instead_of_hanging_everybody(temp_dir, monkeypatch, caplog):
    def unreadable(link):
        raise pickle.UnpicklingError("a torn message")

    with running(ONE) as (client, listener, (process,)):
        monkeypatch.setattr(Connection, "recv", unreadable)
        client.send(BatchRequest())  # the answer to it is read as before
        client.send(BatchRequest())
        assert listener.died.wait(30)
    assert listener.reasons == [f"the worker process {process.pid} was killed by SIGKILL"]
    assert "UnpicklingError: a torn message" in caplog.text


@pytest.mark.process
def test_stop_while_the_worker_starts(temp_dir):
    """Looked for between two looks at the pipe, so that it can end the start nowhere else."""
    asked = []

    def stop_requested():
        asked.append(len(os.listdir(temp_dir)))
        return True

    with pytest.raises(StartInterruptedError):
        ProcessWorkerClient(ONE, stop_requested=stop_requested)
    assert len(asked) == 1
    assert os.listdir(temp_dir) == []


@pytest.mark.process
def test_worker_that_dies_while_it_loads(temp_dir, monkeypatch):
    """Its `paddle` ends the process that imports it."""
    with open(os.path.join(temp_dir, "paddle.py"), "w") as module:
        module.write("import os; os._exit(7)")
    monkeypatch.setenv("PYTHONPATH", temp_dir)
    with pytest.raises(WorkerDiedError, match="the worker process exited with status 7 while starting"):
        ProcessWorkerClient(ONE)


@pytest.mark.process
@over_ranks
def test_a_rank_that_is_killed_is_told_once(temp_dir, caplog, config, rank):
    """Also while another one waits for it."""
    with running(config) as (client, listener, processes):
        victim = processes[rank]
        victim.suspend()
        client.send(BATCH)
        assert not listener.died.wait(2.5)
        victim.kill()
        assert listener.died.wait(60)
    assert listener.reasons == [f"{name_of(rank, config)} {victim.pid} was killed by SIGKILL"]
    assert listener.answers == []
    told = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert told == listener.reasons


@pytest.mark.process
@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"config": replace(TWO, cache_dtype="x")}, ConfigError, "cache dtype"),
        ({"config": replace(TWO, log_level="x")}, WorkerDiedError, "process of rank {} exited with status 1"),
    ],
)
def test_a_rank_that_does_not_start_ends_the_start_of_all(temp_dir, monkeypatch, broken, change, error, message):
    """Before the ranks have met, and behind that."""
    children_before = psutil.Process().children()  # of other tests in this process

    def launch(*, rank, **parts):
        return WorkerLaunch(rank=rank, **{**parts, **(change if rank == broken else {})})

    monkeypatch.setattr(client, "WorkerLaunch", launch)
    with pytest.raises(error, match=message.format(broken)):
        ProcessWorkerClient(TWO)
    assert os.listdir(temp_dir) == []
    assert psutil.Process().children() == children_before


@pytest.mark.process
def test_heads_that_cannot_be_shared_out_are_one_line(temp_dir):
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 must divide the model's num_kv_heads 4"):
        ProcessWorkerClient(replace(ONE, tensor_parallel_size=3))


@pytest.mark.process
def test_worker_that_was_told_to_stop_has_until_the_deadline_to_end(monkeypatch, caplog):
    """Its pipe ends a while before the process, whose libraries are taken down."""
    monkeypatch.setattr(rank_process, "STOP_TIMEOUT_S", 0.0)
    with running(ONE) as (client, _, processes):
        client.close(time.monotonic() + 600)
        assert [process.is_running() for process in processes] == [False]
    assert [each.message for each in caplog.records if "killing it" in each.message] == []
