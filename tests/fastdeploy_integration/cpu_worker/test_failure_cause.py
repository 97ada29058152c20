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


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (TRACEBACK, "ValueError: no such dtype"),
        (ARGPARSE, "FastDeploy LLM Inference: error: argument --pad_token_id: invalid int value: 'None'"),
        ("Traceback (most recent call last):\ncorrupted double-linked list\n", "corrupted double-linked list"),
        (TRACEBACK + "KeyError\n", "KeyError"),
        ("fastdeploy.errors.StartError: " + "x" * 5000, "fastdeploy.errors.StartError: " + "x" * 270),
    ],
    ids=["exception", "argument", "abort", "no message", "long"],
)
def test_the_last_line_that_names_a_cause(tmp_path, text, cause):
    (tmp_path / "launch_worker.log").write_text(text)
    assert failure_cause(tmp_path) == f"{cause} (launch_worker.log)"


def test_the_worker_speaks_before_the_server_that_ended_because_of_it(tmp_path):
    (tmp_path / "api_server.out").write_text("ProcessLookupError: [Errno 3] No such process\n")
    assert failure_cause(tmp_path) == "ProcessLookupError: [Errno 3] No such process (api_server.out)"
    (tmp_path / "workerlog.0").write_text("x" * 100_000 + "\nMemoryError\n")
    assert failure_cause(tmp_path) == "MemoryError (workerlog.0)"
    (tmp_path / "launch_worker.log").write_bytes(b"\xff\n" + ARGPARSE.encode())
    assert failure_cause(tmp_path).startswith("FastDeploy LLM Inference: error: argument --pad_token_id")


@pytest.mark.parametrize(
    "lost",
    [
        "fastdeploy_kvcache_v1.errors.RankLostError: rank 1 of 2 has ended\n",
        "RuntimeError: [/third_party/gloo/gloo/transport/tcp/pair.cc:576] Read error: Connection reset by peer\n",
    ],
)
def test_what_ended_one_rank_comes_before_what_that_did_to_the_others(tmp_path, lost):
    log = tmp_path / "launch_worker.log"
    ended = "worker rank 1 of 2 ended (status 1): the others are ended, too"
    log.write_text(f"MemoryError: no room\n{lost}{ended}\n")
    assert failure_cause(tmp_path) == "MemoryError: no room (launch_worker.log)"
    log.write_text(f"{lost}{ended}\n")
    (tmp_path / "api_server.out").write_text("ProcessLookupError: [Errno 3] No such process\n")
    assert failure_cause(tmp_path) == f"{ended} (launch_worker.log)"


@pytest.mark.parametrize("text", ["", "all is well\nAn Error occurred, it says in the middle of a line: no\n"])
def test_logs_that_name_no_cause(tmp_path, text):
    (tmp_path / "workerlog.0").write_text(text)
    assert failure_cause(tmp_path) is None
