"""What starts, watches and cleans up, as far as it goes without FastDeploy."""

import os
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.weight_updates import CLEARED, CLEARING, NORMAL, UPDATING
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu import (
    RANK_PIPES,
    RUN_DIRECTORY,
    hooks,
    settings,
    supervisor,
)
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.leftovers import remove_files
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.rank_processes import rank_variables, run_ranks
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.token_channel import TokenReceiver, TokenSender
from tests.link.test_link import wait_for

PACKAGE = supervisor.__package__

HOST_COMMAND = (
    "A=1 OMP_NUM_THREADS=3  /usr/bin/python -u -m paddle.distributed.launch --log_dir /logs --devices {} "
    "/fd/fastdeploy/engine/../worker/worker_process.py {}--model m --config '{{\"a\": 1}}' 2>/logs/launch_worker.log"
)


@pytest.mark.parametrize(
    ("devices", "size", "launched", "output"),
    [
        ("0", "", "worker ", "/logs/workerlog.0"),
        ("0,1", "--tensor_parallel_size 2 ", "ranks 2 2 /logs ", "/dev/null"),
        ("0,1", "--tensor_parallel_size 1 --data_parallel_size 2 ", "ranks 2 1 /logs ", "/dev/null"),
        ("0,1", "--tensor_parallel_size 2 --data_parallel_size 2 ", "ranks 4 2 /logs ", "/dev/null"),
        ("0", "--tensor_parallel_size 1 ", "worker ", "/logs/workerlog.0"),
    ],
)
def test_the_workers_command_keeps_its_arguments(devices, size, launched, output):
    """Several ranks are started by a process of their own."""
    assert hooks.cpu_worker_command(HOST_COMMAND.format(devices, size)) == (
        f"exec env A=1 OMP_NUM_THREADS=3  /usr/bin/python -u -m {PACKAGE}.launch "
        f"{launched}{size}--model m --config '{{\"a\": 1}}' >{output} 2>/logs/launch_worker.log"
    )


def test_an_unknown_command_is_an_error():
    with pytest.raises(ConfigError, match="got an unknown command"):
        hooks.cpu_worker_command("python worker.py")


def test_each_data_parallel_engine_has_an_api_server_of_ours(monkeypatch):
    """FastDeploy starts them, and wants a device for each rank."""
    started = []
    monkeypatch.setattr(hooks.subprocess, "Popen", lambda command, **options: started.append((command, options)))
    names = {"subprocess": subprocess}
    exec(
        "def start_servers(**given):\n"
        "    subprocess.Popen(['python', '-m', 'api_server', *given['server_args'], '--port', '5'], env={})\n"
        "    return given['device_count']",
        names,
    )
    given = {"server_args": ["--tensor-parallel-size", "2", "--data-parallel-size", "3"], "device_count": 0}
    assert hooks.start_servers(names["start_servers"], None, (), given) == 6
    command = ["python", "-u", "-m", f"{PACKAGE}.launch", "api", *given["server_args"], "--port", "5"]
    assert started == [(command, {"env": {}})]


def test_to_what_asks_for_cuda_the_platform_has_it_and_is_itself_otherwise():
    names = {"current_platform": SimpleNamespace(is_cuda=lambda: False, name="cpu")}
    exec("def ask(): return current_platform.is_cuda(), current_platform.name", names)
    for _ in range(2):
        assert hooks.as_cuda(names["ask"], None, (), {}) == (True, "cpu")


@pytest.mark.parametrize(("fields", "dtype"), [({}, "float32"), ({"checksum_model": True}, "bfloat16")])
def test_engine_and_worker_take_a_real_model_to_be_of_float32(fields, dtype):
    config = SimpleNamespace(dtype="bfloat16")
    hooks.model_config(lambda args: vars(config).update(args), config, (fields,), {})
    assert config.dtype == dtype


@pytest.fixture
def channel(tmp_path):
    receiver = TokenReceiver(tmp_path / "s")
    sender = TokenSender(tmp_path / "s")
    yield sender, receiver
    sender._socket.close()
    receiver._socket.close()


def test_tokens_cross_the_channel(channel):
    sender, receiver = channel
    assert receiver.receive(wait=False) is None
    sender.send([5, -1, -9], running=True)
    sender.send([], running=False)
    first = receiver.receive(wait=True)
    assert (first.tolist(), first.dtype) == ([1, 3, 5, -1, -9], np.int64)
    assert receiver.receive(wait=True).tolist() == [-1, 0]
    assert receiver.receive(wait=True) is None


def test_a_slow_engine_holds_the_worker_back_and_loses_nothing(channel):
    sender, receiver = channel
    thread = threading.Thread(target=lambda: [sender.send([number], running=True) for number in range(3000)])
    thread.start()
    assert [int(receiver.receive(wait=True)[2]) for _ in range(3000)] == list(range(3000))
    thread.join()


@pytest.mark.parametrize(
    ("names", "are_ours"),
    [
        ("8000.socket router_8000.ipc response_8000_w123.pull cache_ready_signal.8001", True),
        ("fd_lock_gpu_cache_lock.8001 fmq_ctrl_w2e_rank0_8001.ipc fmq_ctrl_c2e_rank0_8002.ipc", True),
        ("fd_task_queue_8002.sock", True),
        ("18000.socket router_80001.ipc cache_ready_signal.18001 psm_8001 fmq_shm_8001 8003.socket", False),
    ],
)
def test_files_of_this_server_are_removed_and_no_others(tmp_path, names, are_ours):
    shared, run = tmp_path / "shm", tmp_path / "run"
    for folder, files in ((shared, names.split()), (run, ["x"])):
        folder.mkdir()
        for name in files:
            (folder / name).touch()
    remove_files(run, (8000,), (8001, 8002), shared)
    assert {path.name for path in shared.iterdir()} == set([] if are_ours else names.split())
    assert not run.exists()


PARENT = """
import subprocess, sys
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu import leftovers
leftovers.adopt_orphans()
subprocess.run([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], check=True)
print(leftovers.end_processes())
"""
"""Runs a program, and ends what it leaves."""

LEAVE = """
import os, subprocess, sys, time
os.setsid()
for number in range(3):
    left = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]], start_new_session=number == 2)
    print(left.pid, flush=True)
"""
"""Leaves three processes, in two sessions."""

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for _ in range(5):
    subprocess.Popen(["sleep", "600"])
time.sleep(600)
"""


def left_by(*program):
    """What a parent of `program` prints."""
    done = subprocess.run([sys.executable, "-c", PARENT, *program], stdout=subprocess.PIPE, check=True, timeout=60)
    return done.stdout.split()


@pytest.mark.process
def test_all_descendants_end_even_processes_that_start_meanwhile():
    *pids, count = map(int, left_by(LEAVE, STUBBORN))
    assert len(pids) == 3 <= count
    assert not any(map(psutil.pid_exists, pids))


FORGET = """
import sys, time, uuid
from multiprocessing import shared_memory
name = f"fmq_shm_{uuid.uuid4().hex}"
shared_memory.SharedMemory(name=name, create=True, size=1).close()
print(name, flush=True)
"""


@pytest.mark.process
def test_shared_memory_with_random_names_goes_with_its_maker():
    """What FastDeploy's large messages are: made, closed, and in nobody's hands until the other side opens them."""
    name, count = left_by(f"{FORGET}import os; os.fork() or time.sleep(600)")
    assert not Path("/dev/shm", name.decode()).exists()
    assert int(count) == 1, "the tracker ended by itself"


SUPERVISOR = """#!/bin/sh
echo $* >{0}/begun
cat
echo >{0}/ended
exit 7
"""


@pytest.mark.process
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 7), (signal.SIGTERM, 7), (signal.SIGKILL, -9)])
def test_the_supervisor_hears_of_the_commands_end_however_it_ends(tmp_path, number, status):
    stand_in = tmp_path / "python"
    stand_in.write_text(SUPERVISOR.format(tmp_path))
    stand_in.chmod(0o700)
    program = f"import sys; sys.executable = {str(stand_in)!r}; from {PACKAGE}.__main__ import main; sys.exit(main())"
    command = subprocess.Popen([sys.executable, "-c", program, "--port", "1"])
    wait_for(lambda: (tmp_path / "begun").exists() and (tmp_path / "begun").read_text(), "the supervisor")
    assert (tmp_path / "begun").read_text() == f"-m {PACKAGE}.supervisor --port 1\n"
    assert not (tmp_path / "ended").exists()
    command.send_signal(number)
    assert command.wait(30) == status
    wait_for((tmp_path / "ended").exists, "its end")


@pytest.mark.parametrize("is_told", [True, False])
def test_nothing_is_left_when_the_server_ends_or_the_command(monkeypatch, tmp_path, is_told):
    events, run = [], tmp_path / "run"

    def serve(settings, run_directory):
        supervisor.pause(0)  # nothing has come yet
        os.close(told) if is_told else None
        supervisor.pause(0)
        return 1

    held, told = os.pipe()
    monkeypatch.setattr(supervisor.sys, "stdin", held)
    monkeypatch.setattr(supervisor, "_serve", serve)
    monkeypatch.setattr(supervisor.tempfile, "mkdtemp", lambda prefix: run.mkdir() or str(run))
    monkeypatch.setattr(supervisor, "adopt_orphans", lambda: events.append("adopted"))
    monkeypatch.setattr(supervisor, "end_processes", lambda: events.append("ended"))
    chosen = SimpleNamespace(log_directory=tmp_path / "log", ports=(1,), queue_ports=(2,), cache_queue_ports=(3,))
    assert supervisor.supervise(chosen) == (0 if is_told else 1)
    assert events == ["adopted", "ended"]
    assert not run.exists()


@pytest.fixture
def parse(monkeypatch, tmp_path):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: object())
    monkeypatch.delenv(settings.SWITCH, raising=False)
    monkeypatch.chdir(tmp_path)
    return settings.parse


def test_settings(parse, tmp_path):
    chosen = parse(["--port", "0", "--log-dir", "here", "--max-num-seqs", "4", "--swap-space", "1"])
    assert chosen.passed_on == ("--max-num-seqs", "4", "--swap-space", "1")
    assert chosen.tensor_parallel_size == 1
    for flag in ("--tensor-parallel-size", "--tensor_parallel_size", "-tp"):
        assert parse(["--port", "0", flag, "2"]).tensor_parallel_size == 2
    assert parse(["--port", "0", "--tensor", "2"]).passed_on == ("--tensor", "2"), "FastDeploy may know it"
    assert len({*chosen.ports, *chosen.queue_ports, *chosen.cache_queue_ports}) == 3
    assert chosen.uses_our_manager
    assert chosen.model is None
    assert chosen.log_directory == tmp_path / "here"


def test_data_parallel_engines_have_ports_of_their_own(parse):
    chosen = parse(["--port", "0", "--data-parallel-size", "2", "--cache-queue-port", "0,0", "--x", "1"])
    assert len({*chosen.ports, *chosen.queue_ports, *chosen.cache_queue_ports}) == 6
    (first, second), queues, caches = chosen.ports, chosen.queue_ports, chosen.cache_queue_ports
    assert chosen.urls == [f"http://127.0.0.1:{first}", f"http://127.0.0.1:{second}"]
    assert " ".join(supervisor._command(chosen, "/m")[3:]) == (
        f"{PACKAGE}.launch servers --num-servers 2 --ports {first},{second} --args --data-parallel-size 2"
        f" --model /m --host 127.0.0.1 --engine-worker-queue-port {queues[0]},{queues[1]}"
        f" --cache-queue-port {caches[0]},{caches[1]} --tensor-parallel-size 1 --x 1"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tensor-parallel-size", "0"], "--tensor-parallel-size must be at least 1"),
        (["--data-parallel-size", "0"], "--data-parallel-size must be at least 1"),
        (["--data-parallel-size", "2", "--ports", "0"], "--ports must name a port for each of 2 data parallel engines"),
        (["--speculative_config={}"], "--speculative-config cannot be used"),
        (["--start-timeout", "0"], "--start-timeout must be positive"),
        (["--port", "70000"], "cannot listen on 127.0.0.1:70000"),
        (["--log-dir", "with space"], "path with spaces"),
    ],
)
def test_settings_that_cannot_work(parse, words, message):
    with pytest.raises(ConfigError, match=message):
        parse(words)


def test_swap_space_needs_our_manager(parse, monkeypatch):
    monkeypatch.setenv(settings.SWITCH, "0")
    assert not parse(["--port", "0"]).uses_our_manager
    with pytest.raises(ConfigError, match="--swap-space needs ENABLE_V1_KVCACHE_MANAGER=1"):
        parse(["--port", "0", "--swap-space", "1"])


def test_without_fastdeploy(monkeypatch):
    monkeypatch.setattr(settings.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="FastDeploy is not installed"):
        settings.parse([])


class Server:
    """A FAKE process of FastDeploy's API server, which ends after so many looks, or when it is told to."""

    pid = 4242

    def __init__(self, looks=10**6, *, obeys=True):
        self.looks, self.obeys, self.returncode, self.told = looks, obeys, None, []
        self.is_reaped = False

    def poll(self):
        self.looks -= 1
        if self.looks < 0:
            self.returncode = 0
        return self.returncode

    def send_signal(self, number):
        self.told.append(number)
        self.returncode = -number if self.obeys else None

    def kill(self):
        self.send_signal(signal.SIGKILL)
        self.returncode = -signal.SIGKILL

    def wait(self, timeout=None):
        if self.returncode is None:
            raise subprocess.TimeoutExpired("server", timeout)
        self.is_reaped = timeout is None
        return self.returncode


@pytest.fixture
def clock(monkeypatch):
    made = SimpleNamespace(now=0.0)

    def pause(seconds):
        made.now = round(made.now + seconds, 3)

    monkeypatch.setattr(supervisor, "time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr(supervisor, "pause", pause)
    return made


@pytest.mark.parametrize(("status", "answers"), [(200, True), (503, False), (None, False)])
def test_a_server_answers_if_it_says_so(status, answers):
    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            if status is not None:  # else it closes the connection without a word
                self.send_response(status if self.path == "/health" else 404)
                self.end_headers()

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert supervisor._answers(*server.server_address) == answers
        thread.join()


@pytest.mark.parametrize(
    ("status", "is_well", "reason"),
    [
        (CLEARED, False, "ended (status 0)"),
        (None, True, "ended (status 0)"),
        *((status, False, "not been healthy for 60 s") for status in (CLEARING, UPDATING, NORMAL, None)),
    ],
)
def test_a_server_without_weights_is_not_ended(tmp_path, monkeypatch, clock, status, is_well, reason):
    monkeypatch.setattr(supervisor, "SHARED_MEMORY", tmp_path)
    if status is not None:
        (tmp_path / "model_weights_status.4711").write_bytes(np.array([status, 99], dtype=np.int32).tobytes())
    looks = []

    def answers(host, port):
        looks.append((port, clock.now))
        return port == 1 or is_well

    monkeypatch.setattr(supervisor, "_answers", answers)
    engines = SimpleNamespace(host="h", ports=(1, 2), queue_ports=(4710, 4711))
    assert reason in supervisor._watch(engines, Server(looks=1000))
    assert looks[:4] == [(1, 5.0), (2, 5.0), (1, 10.0), (2, 10.0)]


@pytest.mark.parametrize(
    ("sick", "ends"),
    [
        (lambda look, clock: look > 1, True),
        (lambda look, clock: look % 13, False),
        (lambda look, clock: look in (1, 3), False),  # suspended for an hour behind each
    ],
)
def test_every_look_for_a_minute_says_that_the_server_is_not_healthy(monkeypatch, clock, sick, ends):
    looks = []

    def is_healthy(settings):
        looks.append(clock.now)
        if len(looks) in (1, 3):
            clock.now += 3600
        return not sick(len(looks), clock)

    monkeypatch.setattr(supervisor, "_is_well", is_healthy)
    told = supervisor._watch(SimpleNamespace(), Server(looks=700))
    assert ("not been healthy" in told) == ends
    assert len(looks) == 14 or not ends


@pytest.mark.parametrize(
    ("well_at", "looks", "reason"),
    [(3, 99, None), (99, 3, "ended during its start (status 0)"), (99, 99, "not ready after 5 s (--start-timeout)")],
)
def test_a_start_ends_when_the_server_answers_has_ended_or_takes_too_long(monkeypatch, clock, well_at, looks, reason):
    asked = []
    monkeypatch.setattr(supervisor, "_is_healthy", lambda settings: asked.append(1) or len(asked) > well_at)
    told = supervisor._wait_ready(SimpleNamespace(start_timeout_s=5.0), Server(looks))
    assert told is None if reason is None else reason in told


@pytest.mark.parametrize(("grows_for_s", "ready_at"), [(0.0, 1.0), (0.5, 1.6), (1e9, 20.0)])
def test_ready_is_told_when_no_more_processes_appear(clock, grows_for_s, ready_at):
    supervisor.wait_settled(lambda: min(clock.now, grows_for_s))
    assert clock.now == pytest.approx(ready_at, abs=supervisor.POLL_S)
    assert clock.now >= min(grows_for_s + supervisor.SETTLED_S, supervisor.SETTLE_LIMIT_S) - 0.01


@pytest.mark.parametrize(
    ("obeys", "ours", "told"), [(True, True, [signal.SIGINT]), (False, False, [signal.SIGINT, signal.SIGKILL])]
)
def test_server_is_announced_when_settled_and_ended_when_unhealthy(monkeypatch, tmp_path, capsys, obeys, ours, told):
    events, started, server = [], [], Server(obeys=obeys)
    monkeypatch.setattr(supervisor.subprocess, "Popen", lambda *given, **more: started.append((given, more)) or server)
    monkeypatch.setattr(supervisor, "_wait_ready", lambda *_: events.append("healthy"))
    monkeypatch.setattr(supervisor, "wait_settled", lambda count: events.append(("settled", capsys.readouterr().out)))
    monkeypatch.setattr(supervisor, "_watch", lambda *_: "enough")
    warned = b"  warnings.warn('resource_tracker')\n" * 20
    (tmp_path / "workerlog.0").write_bytes(b"x\n" * 20 + b"\xff MemoryError\n" + warned)
    said = "--- workerlog.0\n" + "x\n" * 14 + "\ufffd MemoryError\n--- api_server.out\n"
    chosen = SimpleNamespace(
        log_directory=tmp_path, uses_our_manager=ours, urls=["http://x"], tensor_parallel_size=1, model="/m", host="h",
        ports=(5,), queue_ports=(6,), cache_queue_ports=(7,), passed_on=("--swap-space", "1"),
    )  # fmt: skip
    assert supervisor._serve(chosen, tmp_path) == 1
    assert events == ["healthy", ("settled", "")]
    out, error = capsys.readouterr()
    assert out.startswith("Ready: http://x ")
    assert ("this package's cache manager" in out) == ours
    assert error == f"fastdeploy-kvcache: error: enough; the logs are in {tmp_path}\n{said}"
    assert (server.told, server.is_reaped) == (told, True)
    ((command,), process) = started[0]
    assert " ".join(command[2:]) == (
        f"-m {PACKAGE}.launch api --model /m --host h --port 5 --engine-worker-queue-port 6"
        " --cache-queue-port 7 --tensor-parallel-size 1 --swap-space 1"
    )
    assert process["env"]["ENABLE_V1_KVCACHE_MANAGER"] == ("1" if ours else "0")
    assert process["env"][RUN_DIRECTORY] == process["env"]["TMPDIR"] == str(tmp_path)
    assert process["env"]["PROMETHEUS_MULTIPROC_DIR"] == str(tmp_path / "prometheus")
    assert process["start_new_session"], "signals to its group do not reach us"


# ---- the processes of a group live and end together


TELL = "import os; print(os.environ['PADDLE_TRAINER_ID'], os.environ['PADDLE_TRAINERS_NUM'], flush=True)"
ENDS_FIRST = """
import os, sys, time
if os.environ["PADDLE_TRAINER_ID"] == "1":
    sys.exit({status})
time.sleep(1000)
"""


@pytest.fixture
def own_children():
    """The children that this test has made: other tests of this process may have left some of theirs."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


@pytest.mark.process
@pytest.mark.parametrize(("status", "told"), [(7, 7), (0, 1)])
def test_the_end_of_one_rank_is_that_of_all(tmp_path, capfd, own_children, status, told):
    """None ends by itself, so 0 is no success."""
    assert run_ranks([sys.executable, "-c", ENDS_FIRST.format(status=status)], 3, tmp_path) == told
    assert own_children() == []
    assert capfd.readouterr().err == f"worker rank 1 of 3 ended (status {status}): the other ranks were ended too\n"


@pytest.mark.process
def test_a_killed_rank_is_one_that_ended(tmp_path, capfd, own_children):
    statuses = []
    command = [sys.executable, "-c", f"{TELL}; import time; time.sleep(1000)"]
    thread = threading.Thread(target=lambda: statuses.append(run_ranks(command, 2, tmp_path)))
    thread.start()
    logs = [tmp_path / f"workerlog.{rank}" for rank in range(2)]
    while not all(log.exists() and "\n" in log.read_text() for log in logs):
        pass
    assert [log.read_text() for log in logs] == ["0 2\n", "1 2\n"], "each knows its rank, and has its log"
    own_children()[0].kill()
    thread.join(60)
    assert statuses == [1]
    assert own_children() == []
    assert "ended (status -9)" in capfd.readouterr().err


MEET = f"""
import os, time
from fastdeploy_kvcache_v1.lab.model.ranks import Ranks, inherited_pipes
rank = int(os.environ["PADDLE_TRAINER_ID"])
ranks = Ranks(rank, inherited_pipes(os.environ["{RANK_PIPES}"].split()), size=3)
print(ranks.union([rank]), ranks.union([-rank]), flush=True)
ranks.union([])
if rank == 2:
    raise SystemExit(5)
time.sleep(1000)
"""


@pytest.mark.process
def test_the_ranks_meet_over_pipes_that_they_inherit(tmp_path):
    assert run_ranks([sys.executable, "-c", MEET], 3, tmp_path) == 5
    for rank in range(3):
        assert (tmp_path / f"workerlog.{rank}").read_text() == "{0, 1, 2} {0, -1, -2}\n"


def test_every_rank_has_an_address_and_all_meet_at_another():
    first, second = (rank_variables(rank, [5, 6, 7]) for rank in range(2))
    assert first["PADDLE_TRAINER_ENDPOINTS"] == second["PADDLE_TRAINER_ENDPOINTS"] == "127.0.0.1:5,127.0.0.1:6"
    assert (first["PADDLE_CURRENT_ENDPOINT"], second["PADDLE_CURRENT_ENDPOINT"]) == ("127.0.0.1:5", "127.0.0.1:6")
    assert first["PADDLE_MASTER"] == second["PADDLE_MASTER"] == "127.0.0.1:7"
