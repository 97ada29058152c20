"""Which line of FastDeploy's logs becomes the reason that a user reads."""

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.failure_cause import failure_cause

TRACEBACK = """INFO 2026-11-22 loading
Traceback (most recent call last):
  File "worker.py", line 7, in load
    raise ValueError("no such dtype")
ValueError: no such dtype
Loading Weights:   0%|\rLoading Weights:   1%|
"""
ARGPARSE = """usage: launch.py [-h] [--pad_token_id PAD_TOKEN_ID]
FastDeploy LLM Inference: error: argument --pad_token_id: invalid int value: 'None'
"""
NO_PROCESS = "ProcessLookupError: [Errno 3] No such process"
LOST = "fastdeploy_kvcache_v1.errors.RankLostError: rank 1 of 2 has ended\n"
RESET = "RuntimeError: [/third_party/gloo/gloo/transport/tcp/pair.cc:576] Read error: Connection reset by peer\n"
ENDED = "worker rank 1 of 2 ended (status 1): the others are ended, too"


@pytest.mark.parametrize(
    ("logs", "cause"),
    [
        # by log: launch_worker.log, api_server.out, workerlog.0
        ([TRACEBACK], "ValueError: no such dtype (launch_worker.log)"),
        ([ARGPARSE], ARGPARSE.splitlines()[1] + " (launch_worker.log)"),
        (
            ["Traceback (most recent call last):\ncorrupted double-linked list\n"],
            "corrupted double-linked list (launch_worker.log)",
        ),
        ([TRACEBACK + "KeyError\n"], "KeyError (launch_worker.log)"),
        (["fd.errors.StartError: " + "x" * 5000], f"fd.errors.StartError: {'x' * 278} (launch_worker.log)"),
        # the worker speaks before the server that ended because of it
        (["", NO_PROCESS], f"{NO_PROCESS} (api_server.out)"),
        (["", NO_PROCESS, "x" * 100_000 + "\nMemoryError\n"], "MemoryError (workerlog.0)"),
        (["\udcff\n" + ARGPARSE, NO_PROCESS, "MemoryError"], ARGPARSE.splitlines()[1] + " (launch_worker.log)"),
        # what ended one rank comes before what that did to the others
        *(
            ([f"MemoryError: no room\n{lost}{ENDED}\n"], "MemoryError: no room (launch_worker.log)")
            for lost in (LOST, RESET)
        ),
        *(([f"{lost}{ENDED}\n", NO_PROCESS], f"{ENDED} (launch_worker.log)") for lost in (LOST, RESET)),
        ([""], None),
        (["all is well\nAn Error occurred, it says in the middle of a line: no\n"], None),
    ],
)
def test_the_last_line_that_names_a_cause(tmp_path, logs, cause):
    for name, text in zip(("launch_worker.log", "api_server.out", "workerlog.0"), logs, strict=False):
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    assert failure_cause(tmp_path) == cause
