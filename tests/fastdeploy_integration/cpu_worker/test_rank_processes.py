"""The processes of a group live and end together."""

import sys
import threading

import psutil
import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.cpu_worker.rank_processes import rank_variables, run_ranks

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
    assert capfd.readouterr().err == f"worker rank 1 of 3 ended (status {status}): the others are ended, too\n"


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


def test_every_rank_has_an_address_and_all_meet_at_another():
    first, second = (rank_variables(rank, [5, 6, 7]) for rank in range(2))
    assert first["PADDLE_TRAINER_ENDPOINTS"] == second["PADDLE_TRAINER_ENDPOINTS"] == "127.0.0.1:5,127.0.0.1:6"
    assert (first["PADDLE_CURRENT_ENDPOINT"], second["PADDLE_CURRENT_ENDPOINT"]) == ("127.0.0.1:5", "127.0.0.1:6")
    assert first["PADDLE_MASTER"] == second["PADDLE_MASTER"] == "127.0.0.1:7"
