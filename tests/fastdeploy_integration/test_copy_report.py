"""The message with which a worker rank tells of its copies, and where its socket is."""

import json
import pickle
import tempfile
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.copy_totals import CopyTotals, RankCopies
from fastdeploy_kvcache_v1.errors import MessageVersionError
from fastdeploy_kvcache_v1.fastdeploy_integration.copy_report import (
    MAX_SOCKET_PATH,
    VERSION,
    CopyReport,
    socket_path,
)
from fastdeploy_kvcache_v1.metadata import EVICT, SWAP_IN, CopyPath, PassProgress, TransferResult
from fastdeploy_kvcache_v1.timings import LoadTime, PrefillTime, Timings

COPIES = RankCopies(CopyTotals(1, 2, 0.5, 3), CopyTotals(4, 5, 0.25, 6), 0.125)
FAILED = (
    TransferResult(7, *EVICT, 2, 0, 0.0, (4, 5), "OSError: bus error"),
    TransferResult(8, *SWAP_IN, 1, 0, 0.0, (9,), "late"),
)


@pytest.mark.parametrize("failed", [(), FAILED])
def test_a_report_survives_the_message(failed):
    timings = Timings((LoadTime(7, 0.1), LoadTime(1, 1e-5)), (PrefillTime(100, 5000.5, 0.3),))
    for passes in (None, PassProgress(8, 12345.678901234567), PassProgress(-1, 0.1, True)):
        paths = CopyPath("in", "kernel"), CopyPath("out", "batch", "it hangs")
        report = CopyReport(3, "17-1", 12, COPIES, failed, 8, 2, passes, timings, paths)
        assert CopyReport.loads(report.dumps()) == report


@pytest.mark.parametrize(
    "message",
    [json.dumps([VERSION + 1, 0]), "[]", "{}", "null", json.dumps([str(VERSION), 0])],
)
def test_a_message_of_another_version_says_so(message):
    with pytest.raises(MessageVersionError, match=f"a copy report has version .* reads version {VERSION}"):
        CopyReport.loads(message.encode())


FIELDS = {"rank": 0, "worker": "w", "number": 0, "swap_in": [0] * 4, "swap_out": [0] * 4, "waited": 0}
FIELDS |= {"failed": [], "ended": -1, "unlisted": -1, "passes": None, "timings": [[], []], "paths": []}


def message(**changed):
    return json.dumps([VERSION, *(FIELDS | changed).values()]).encode()


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"not json",
        b"\xff\xfe",
        pickle.dumps(CopyReport(0, "17-1", 0, COPIES)),
        json.dumps([VERSION]).encode(),
        json.dumps([VERSION, *FIELDS.values()][:-1]).encode(),
        message(swap_in=[0] * 5),
        message(waited=None),
        message(failed=[[1, "device", "moon", 1, [1], "e"]]),
        message(failed=[["x", "device", "host", 1, [1], "e"]]),
        message(failed=[[1, "device", "host", 1, ["a"], "e"]]),
        message(ended="x"),
        message(passes=[0, "x", True]),
        message(passes=7),
        message(timings=7),
        message(timings=[[[1, "x"]], []]),
        message(timings=[[], [[1, 2]]]),
        message(paths=[["in"]]),
    ],
)
def test_what_is_no_report_is_a_value_error(garbage):
    assert CopyReport.loads(message()).rank == 0, "the others differ from this one"
    with pytest.raises(ValueError, match=r"."):
        CopyReport.loads(garbage)


def test_engines_of_one_machine_have_directories_of_their_own(monkeypatch):
    assert socket_path(8001).parent != socket_path(8002).parent
    assert socket_path(8001).is_relative_to(tempfile.gettempdir())
    monkeypatch.setattr(tempfile, "tempdir", "/tmp/" + "x" * 100)
    assert len(str(socket_path(65535))) <= MAX_SOCKET_PATH
    assert socket_path(65535).is_relative_to(Path("/tmp"))
