"""Which reports a worker of FastDeploy sends to its engine."""

from fastdeploy_kvcache_v1.contract.messages import (
    SWAP_OUT,
    CopyPath,
    CopyResult,
    PassProgress,
    PrefillTime,
    RankCopies,
    WorkerReport,
)
from fastdeploy_kvcache_v1.fastdeploy_integration.link import ReportSender

MADE, FAILED = CopyResult(3, *SWAP_OUT, 1, 10, 0.0), CopyResult(4, *SWAP_OUT, 1, 0, 0.0, (4,), "injected")
PATHS = RankCopies(paths=(CopyPath("in", "kernel"),))


def sent(*reports):
    told = []
    sender = ReportSender(told.append)
    for each in reports:
        sender(each)
    return told


def test_only_reports_with_news_are_sent():
    idle = WorkerReport(copies=PATHS)
    news = [
        WorkerReport(ended_through=1, copies=PATHS),
        WorkerReport(ended_through=1, passes=PassProgress(1, 0.5)),
        WorkerReport(ended_through=1, prefills=(PrefillTime(100, 7.0, 0.5),)),
        WorkerReport((FAILED,), ended_through=1),
    ]
    assert sent(idle, *(each for one in news for each in (one, idle))) == [idle, *news]


def test_the_first_report_waits_for_the_copy_paths():
    assert sent(WorkerReport(copies=RankCopies()), WorkerReport(copies=PATHS), WorkerReport(copies=PATHS)) == [
        WorkerReport(copies=PATHS)
    ]


def test_of_copies_those_that_failed_are_listed():
    assert sent(WorkerReport((MADE, FAILED))) == [WorkerReport((FAILED,))]
    assert sent(WorkerReport((MADE,), copies=PATHS)) == [WorkerReport(copies=PATHS)]
