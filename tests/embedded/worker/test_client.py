"""The engine's end of the worker process, where things go wrong before or between answers."""

import errno
import os
import re
import tempfile
import threading
from dataclasses import replace

import psutil
import pytest
import zmq

from fastdeploy_kvcache_v1.batch_request import BatchRequest
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.embedded.settings import ServerConfig
from fastdeploy_kvcache_v1.embedded.worker import rank_process
from fastdeploy_kvcache_v1.embedded.worker.client import ProcessWorkerClient, StartInterruptedError
from fastdeploy_kvcache_v1.embedded.worker.rank_process import RankProcess
from fastdeploy_kvcache_v1.errors import ConfigError, WorkerDiedError
from fastdeploy_kvcache_v1.metadata import CacheLevel, CacheSwapMetadata, SwapStep

CONFIG = ServerConfig(cache=KVCacheConfig(8, block_size=16), max_model_len=128, worker_timeout=0)


@pytest.fixture
def temp_dir(monkeypatch):
    with tempfile.TemporaryDirectory(prefix="kv-") as path:  # short, for unix sockets
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield path


@pytest.mark.parametrize(
    ("owner", "name", "error", "message"),
    [
        (tempfile, "mkdtemp", OSError, "cannot make a temporary directory: "),
        (zmq.Socket, "bind", zmq.ZMQError, "cannot make a socket in "),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_nothing(temp_dir, monkeypatch, owner, name, error, message):
    def no_space(*arguments, **options):
        raise error(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(owner, name, no_space)
    with pytest.raises(ConfigError, match=f"{message}.*No space left on device"):
        ProcessWorkerClient(CONFIG)
    assert os.listdir(temp_dir) == []


@pytest.mark.process
def test_names_are_gone_before_the_model_is_loaded(temp_dir, monkeypatch):
    """So that a SIGKILL in the long part of the start leaves nothing behind."""
    seen = []
    expect = RankProcess._expect

    def watch(self, kind):
        seen.append((kind.__name__, len(os.listdir(temp_dir))))
        return expect(self, kind)

    monkeypatch.setattr(RankProcess, "_expect", watch)
    client = ProcessWorkerClient(CONFIG)
    client.close()
    assert seen == [("WorkerConnected", 1), ("WorkerReady", 0)]


@pytest.mark.process
def test_unreadable_answer_ends_the_worker_instead_of_hanging_everybody(temp_dir, monkeypatch, caplog):
    client = ProcessWorkerClient(CONFIG)
    try:
        died, reasons = threading.Event(), []

        def on_death(reason):
            reasons.append(reason)
            died.set()

        def unreadable(data):
            raise EOFError("a torn message")

        (pid,) = client.pids
        client.listen(lambda rank, message: None, on_death)
        monkeypatch.setattr(rank_process.pickle, "loads", unreadable)
        client.send(BatchRequest())
        assert died.wait(30)
        assert reasons == [f"the worker process {pid} was killed by SIGKILL"]
        assert "EOFError: a torn message" in caplog.text
    finally:
        client.close()


@pytest.mark.process
def test_stop_while_the_worker_starts(temp_dir):
    """Looked for between two looks at the sockets, so that it can end the start nowhere else."""
    asked = []

    def stop_requested():
        asked.append(len(os.listdir(temp_dir)))
        return True

    with pytest.raises(StartInterruptedError):
        ProcessWorkerClient(CONFIG, stop_requested=stop_requested)
    assert len(asked) == 1
    assert os.listdir(temp_dir) == []


@pytest.mark.process
def test_worker_that_dies_after_it_connected(temp_dir, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", write_fatal_paddle(temp_dir))
    with pytest.raises(WorkerDiedError, match="the worker process exited with status 7 while starting"):
        ProcessWorkerClient(CONFIG)


@pytest.mark.process
@pytest.mark.parametrize("timeout_s", [1.0, 0.0])
def test_stopped_worker_is_told_once_and_killed(temp_dir, caplog, timeout_s):
    """Without a limit it is told of when somebody kills it."""
    client = ProcessWorkerClient(replace(CONFIG, worker_timeout=timeout_s))
    try:
        died, reasons = threading.Event(), []

        def on_death(reason):
            reasons.append(reason)
            died.set()

        worker = psutil.Process(*client.pids)
        client.listen(lambda rank, message: None, on_death)
        worker.suspend()
        client.send(BatchRequest())
        if timeout_s:
            assert died.wait(30)
            reason = f"the worker process {worker.pid} is stuck: step 1 has computed nothing for \\d+ s"
        else:
            assert not died.wait(2.5)
            worker.kill()
            assert died.wait(30)
            reason = f"the worker process {worker.pid} was killed by SIGKILL"
        client._ranks[0]._thread.join(1.0)
        assert [record.getMessage() for record in caplog.records] == reasons
        assert [re.fullmatch(reason, each) is not None for each in reasons] == [True]
    finally:
        client.close()


@pytest.mark.process
def test_copy_that_never_ends_is_noticed_while_steps_come_and_go(temp_dir):
    config = replace(CONFIG, cache=replace(CONFIG.cache, num_host_blocks=4), worker_timeout=1.0)
    client = ProcessWorkerClient(config, copy_faults='{"hang": {"output": [0]}}')
    try:
        died, reasons, answers = threading.Event(), [], []

        def on_message(rank, message):
            answers.append(message)
            client.send(BatchRequest())

        def on_death(reason):
            reasons.append(reason)
            died.set()

        (pid,) = client.pids
        client.listen(on_message, on_death)
        evict = CacheSwapMetadata(CacheLevel.DEVICE, CacheLevel.HOST, (1,), (2,))
        client.send(BatchRequest(swap_steps=[SwapStep(6, (evict,))]))
        assert died.wait(30)
        (reason,) = reasons
        assert re.fullmatch(
            rf"the worker process {pid} is stuck: the copy of swap step 6 has not ended for \d+ s", reason
        )
        assert len(answers) > 10
    finally:
        client.close()


def write_fatal_paddle(directory):
    """A place on the path whose `paddle` ends the process that imports it."""
    place = os.path.join(directory, "place")
    os.mkdir(place)
    with open(os.path.join(place, "paddle.py"), "w") as module:
        module.write("import os; os._exit(7)")
    return place
