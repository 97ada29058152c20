"""Several worker processes: one that ends or hangs is named, once, and the others do not outlive the server."""

import os
import re
import tempfile
import threading
from dataclasses import replace

import psutil
import pytest

from fastdeploy_kvcache_v1.batch_request import BatchRequest
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.embedded.settings import ServerConfig
from fastdeploy_kvcache_v1.embedded.worker import rank_process
from fastdeploy_kvcache_v1.embedded.worker.client import ProcessWorkerClient
from fastdeploy_kvcache_v1.errors import ConfigError, WorkerDiedError
from fastdeploy_kvcache_v1.model.sampler import SamplingParams
from fastdeploy_kvcache_v1.model.step import StepTask

pytestmark = pytest.mark.process

CONFIG = ServerConfig(
    cache=KVCacheConfig(8, block_size=16), max_model_len=128, worker_timeout=0, tensor_parallel_size=2
)
TASK = StepTask("r", [1, 2, 3], 0, [5], True, SamplingParams())


@pytest.fixture
def temp_dir(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="kv-") as path:  # short, for unix sockets
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield path


class Listener:
    def __init__(self, client):
        self.answers, self.reasons = [], []
        self.answered, self.died = threading.Semaphore(0), threading.Event()
        client.listen(self.on_message, self.on_death)

    def on_message(self, rank, message):
        self.answers.append((rank, message))
        self.answered.release()

    def on_death(self, reason):
        self.reasons.append(reason)
        self.died.set()


def test_every_rank_gets_the_batch_and_answers_with_the_same_token(temp_dir):
    client = ProcessWorkerClient(CONFIG)
    try:
        assert os.listdir(temp_dir) == [], "names are gone once the ranks have met"
        listener = Listener(client)
        client.send(BatchRequest([TASK]))
        for _ in range(2):
            assert listener.answered.acquire(timeout=60)
        assert sorted(rank for rank, _ in listener.answers) == [0, 1]
        (first, second) = [answer.tokens for _, answer in listener.answers]
        assert first == second
        assert list(first) == ["r"]
        processes = [psutil.Process(pid) for pid in client.pids]
    finally:
        client.close()
    assert not any(process.is_running() for process in processes)
    assert listener.reasons == []


@pytest.mark.parametrize("dead", [0, 1])
def test_a_rank_that_is_killed_is_named_once_while_the_other_waits_for_it(temp_dir, dead):
    client = ProcessWorkerClient(CONFIG)
    try:
        listener = Listener(client)
        victim = psutil.Process(client.pids[dead])
        victim.suspend()
        client.send(BatchRequest([TASK]))
        victim.kill()
        assert listener.died.wait(60)
    finally:
        client.close()
    assert listener.reasons == [f"the worker process of rank {dead} {victim.pid} was killed by SIGKILL"]
    assert listener.answers == []


@pytest.mark.parametrize("stuck", [0, 1])
def test_of_a_rank_that_hangs_and_one_that_waits_for_it_the_former_is_named(temp_dir, stuck):
    client = ProcessWorkerClient(replace(CONFIG, worker_timeout=1.0))
    try:
        listener = Listener(client)
        victim = psutil.Process(client.pids[stuck])
        victim.suspend()
        client.send(BatchRequest([TASK]))
        assert listener.died.wait(60)
    finally:
        client.close()
    (reason,) = listener.reasons
    named = rf"the worker process of rank {stuck} {victim.pid} is stuck: step 1 has computed nothing for \d+ s"
    assert re.fullmatch(named, reason)


@pytest.mark.parametrize("broken", [0, 1])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"copy_faults": "{"}, ConfigError, "not a valid description of copy faults"),
        (
            {"config": replace(CONFIG, log_level="no such level")},
            WorkerDiedError,
            "the worker process of rank {} exited with status 1",
        ),
    ],
)
def test_a_rank_that_does_not_start_ends_the_start_of_all(temp_dir, monkeypatch, broken, change, error, message):
    """Before the ranks have met, and behind that."""
    spawn = rank_process._spawn
    children_before = psutil.Process().children()  # of other tests in this process

    def spawn_one_broken(launch):
        if launch.rank == broken:
            launch = replace(launch, **change)
        return spawn(launch)

    monkeypatch.setattr(rank_process, "_spawn", spawn_one_broken)
    with pytest.raises(error, match=message.format(broken)):
        ProcessWorkerClient(CONFIG)
    assert os.listdir(temp_dir) == []
    assert psutil.Process().children() == children_before


def test_heads_that_cannot_be_shared_out_are_one_line(temp_dir):
    with pytest.raises(ConfigError, match="--tensor-parallel-size 3 must divide the model's num_kv_heads 4"):
        ProcessWorkerClient(replace(CONFIG, tensor_parallel_size=3))
