"""What a worker of FastDeploy and its engine say to each other."""

from fastdeploy_kvcache_v1.contract.messages import (
    SWAP_OUT,
    CopyPath,
    CopyResult,
    PassProgress,
    PrefillTime,
    RankCopies,
    WorkerReport,
)
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.leases import LeaseOpened, LeaseWithdrawn
from fastdeploy_kvcache_v1.fastdeploy_integration.link import TYPES, ReportSender
from fastdeploy_kvcache_v1.link.messages import decode, encode
from fastdeploy_kvcache_v1.transfer.fetch import FetchResult
from fastdeploy_kvcache_v1.transfer.geometry import Geometry, RoleGeometry
from fastdeploy_kvcache_v1.transfer.offer_desk import LeaseEnd
from fastdeploy_kvcache_v1.transfer.rank_messages import CancelFetch, OpenLease, StartFetch, TransferNews, WithdrawLease
from fastdeploy_kvcache_v1.transfer.role_info import RankInfo
from fastdeploy_kvcache_v1.transfer.settings import PeerPort

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


SAID_BY_RANKS = (
    LeaseOpened("transfer", "a"),
    LeaseWithdrawn("transfer"),
    LeaseEnd("transfer", "a", "the peer is gone"),
    TransferNews((LeaseEnd("transfer", "a", None),), (FetchResult("a", 7, 1.5, (1, 2), "gone"),)),
    RankInfo(7, b"address", Geometry("a model", 4, 1, (RoleGeometry("key", "float32", 16, 1),), 2, 2, 0)),
)
SAID_BY_ENGINES = (
    OpenLease("transfer", "a", (1, 2), 7, (PeerPort("127.0.0.1", 9),)),
    WithdrawLease("transfer", "paused"),
    StartFetch("a", (1, 2), 0, 5),
    CancelFetch("a", "gone"),
)


def test_each_message_of_transfers_survives_the_link():
    for table, messages in ((TYPES.to_engine, SAID_BY_RANKS), (TYPES.to_rank, SAID_BY_ENGINES)):
        for each in messages:
            assert decode(table, encode(each)) == each
