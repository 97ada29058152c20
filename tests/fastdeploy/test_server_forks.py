"""FastDeploy forks its API processes from the engine, whose threads stay behind: each of them answers.

`FASTDEPLOY_KVCACHE_STARTS=10` looks at ten starts, one after another.
"""

import os
import re
import signal
import subprocess
import sys
from contextlib import ExitStack

import pytest

from .cpu_server import ask, started, wait_until

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(1200)]

API_PROCESSES = 40
BUSY_LOOPS = 2
STARTS = int(os.getenv("FASTDEPLOY_KVCACHE_STARTS", "1"))
POST = r'"POST /v1/chat/completions HTTP/1.1" 200'
ANSWERED = re.compile(rf"^(?:INFO +\S+ \S+|\[.{{19}}\]) \[?(\d+)\b.*{POST}", re.MULTILINE)
"""The access log of 2.6 and that of 2.5."""


@pytest.fixture
def busy():
    with ExitStack() as stack:
        for _ in range(BUSY_LOOPS):
            loop = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(loop.kill)
        yield


@pytest.mark.parametrize("start", range(STARTS))
def test_every_api_process_answers_that_was_forked_beside_busy_loops(release, tmp_path, busy, start):
    """A process that has answered is stopped, so the next request goes to another one."""
    blocks = ("--num-gpu-blocks-override", "64")
    stopped = set()

    def answered_by():
        output = (server.logs / "api_server.out").read_text(errors="replace")
        return {int(pid) for pid in ANSWERED.findall(output)} - stopped

    with started(release, tmp_path, *blocks, "--workers", str(API_PROCESSES)) as (server, _):
        try:
            for number in range(API_PROCESSES):
                with server.client() as client:
                    ask(client, f"hello {number}", max_tokens=2)
                wait_until(answered_by, "the line of the access log")
                for pid in answered_by():
                    os.kill(pid, signal.SIGSTOP)
                    stopped.add(pid)
        finally:
            for pid in stopped:
                os.kill(pid, signal.SIGCONT)
            print(f"{release}, start {start}: {len(stopped)} of {API_PROCESSES} API processes answered")
    assert len(stopped) == API_PROCESSES
