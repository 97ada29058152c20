"""Signals, crashes and wrong settings: the exit status is right and nothing is left behind."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress

import httpx2
import psutil
import pytest
from openai import OpenAIError

from fastdeploy_kvcache_v1.lab.fastdeploy_cpu import leftovers
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.supervisor import UNHEALTHY_S
from fastdeploy_kvcache_v1.lab.model.directory import write_random_directory
from tests.storage.attention_store.stand_in import environment as sdk
from tests.storage.attention_store.stand_in import set_faults

from .cpu_server import START_TIMEOUT_S, CpuServer, started, user, wait_until
from .fastdeploy_trees import RELEASES, run_inside, tree

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(600)]

BLOCKS = ("--num-gpu-blocks-override", "32")


@pytest.fixture
def starting(release, tmp_path):
    server = CpuServer(release, tmp_path, *BLOCKS)
    yield server
    server.kill()


def test_ctrl_c(release, tmp_path):
    with started(release, tmp_path, *BLOCKS) as (server, _):
        assert server.stop(signal.SIGINT) == 0, server.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start(starting, number):
    wait_until((starting.logs / "workerlog.0").exists, "the worker to start", 120)
    time.sleep(1)
    assert starting.stop(number) == 0, starting.stderr


def api_server(server):
    """The supervisor's own child, before those that it adopted."""
    (supervisor,) = psutil.Process(server.process.pid).children()
    return min(supervisor.children(), key=psutil.Process.create_time)


VICTIMS = {
    "worker": CpuServer.worker,
    "API server": api_server,
    "supervisor": lambda server: psutil.Process(server.process.pid),
}


@pytest.mark.parametrize("victim", VICTIMS)
def test_whoever_dies_the_others_end_and_nothing_is_left(release, tmp_path, victim):
    with started(release, tmp_path, *BLOCKS) as (server, _):
        server.remember_descendants()
        VICTIMS[victim](server).kill()
        # Release 2.5 sometimes hangs on its way out; then the supervisor ends it when it was unhealthy for a minute.
        assert server.process.wait(2 * UNHEALTHY_S) == (-signal.SIGKILL if victim == "supervisor" else 1)
        if victim == "worker":
            assert "FastDeploy's server ended" in server.stderr or "has not been healthy" in server.stderr
        server.assert_nothing_left()


def test_a_rank_that_ends_ends_the_server_and_is_named(release, tmp_path):
    """Under an open stream, which does not hang and does not come to a good end."""
    rank = RELEASES.index(release) % 2  # each release another one
    with started(release, tmp_path, *BLOCKS, "--tensor-parallel-size", "2") as (server, client):
        server.remember_descendants()
        options = {"stream": True, "max_tokens": 450, "extra_body": {"min_tokens": 450}}
        stream = client.chat.completions.create(model="tiny", messages=user("go on"), **options)
        chunks = [next(stream), next(stream)]
        server.workers()[rank].kill()
        with suppress(OpenAIError, httpx2.HTTPError):
            chunks.extend(stream)
        assert not any(choice.finish_reason for chunk in chunks for choice in chunk.choices)
        assert server.process.wait(120) == 1
        assert re.search(rf"worker rank {rank} of 2 ended \(status -9\)", server.stderr)
        server.assert_nothing_left()


MESSAGE = f"""
import os, subprocess, sys, time
from fastdeploy.inter_communicator.fmq import Descriptor
from {leftovers.__name__} import adopt_orphans, end_processes
adopt_orphans()
told, tell = os.pipe()
if os.fork() == 0:
    os.write(tell, Descriptor.create(b"x").shm_name.encode())
    time.sleep(600)
name = os.read(told, 1000).decode()
print(name, os.path.exists(f"/dev/shm/{{name}}"), end_processes(), os.path.exists(f"/dev/shm/{{name}}"))
"""


def test_a_large_message_that_nobody_received_goes_with_its_sender(release, tmp_path):
    """Its name is random, and nobody has it open: it is left to the sender's resource tracker."""
    environment = {**os.environ, "PYTHONPATH": str(tree(release)), "FD_LOG_DIR": str(tmp_path)}
    command = [sys.executable, "-c", MESSAGE]
    said = subprocess.run(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    assert said.splitlines()[-1].split()[1:] == ["True", "1", "False"], said


# ---- what cannot start: the supervisor ends with 1, says why, and leaves nothing


def as_it_is(tmp_path):
    return {}


def forget_padding(tmp_path):
    """FastDeploy hands its worker the padding token as a number, and ends with status 0 when that fails."""
    for path in write_random_directory(tmp_path / "model").glob("*.json"):
        content = json.loads(path.read_text())
        if content.pop("pad_token_id", content.pop("pad_token", None)) is not None:
            path.write_text(json.dumps(content))
    return {}


def expired(tmp_path):
    """The environment of an attention store whose vendor refuses it."""
    set_faults(tmp_path / "store", match={"error": "licence expired"})
    return sdk(tmp_path / "store")


STORE = ("--kvcache-storage-backend", "file", "--kvcache-storage-dir", "kv")
ATTENTION_STORE = ("--kvcache-storage-backend", "attention_store")
REFUSALS = {
    # case: what is done before, flags, what is said
    "no padding token": (forget_padding, BLOCKS, "argument --pad_token_id: invalid int value: 'None'"),
    "too late": (as_it_is, (*BLOCKS, "--start-timeout", "3"), "was not ready after 3 s"),
    "an error of FastDeploy": (as_it_is, ("--num-gpu-blocks-override", "2"), "num_gpu_blocks_override"),
    "a store behind no host tier": (as_it_is, STORE, "--kvcache-storage-backend file without --swap-space"),
    "no licence": (expired, ATTENTION_STORE, "attention_store cannot be used: the attention store cannot be used: lic"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_cannot_start_is_said_and_leaves_nothing(release, tmp_path, case):
    prepare, flags, reason = REFUSALS[case]
    server = CpuServer(release, tmp_path, *flags, environment=prepare(tmp_path))
    try:
        assert server.process.wait(START_TIMEOUT_S) == 1
        assert "fastdeploy-kvcache: error: " in server.stderr
        assert reason in server.stderr
        server.assert_nothing_left()
    finally:
        server.kill()


def test_a_wrong_setting_is_one_line(release, tmp_path):
    words = ["-m", "fastdeploy_kvcache_v1.cli", "serve", "--fastdeploy-cpu", "--tensor-parallel-size", "3"]
    output = run_inside(release, tmp_path, *words, expect=2)
    assert "--tensor-parallel-size 3 must divide the model's num_kv_heads" in output
    assert output.count("\n") == 1
