"""Forks a process whose threads use locks and sockets of ours as fast as they can: `python -m tests.fork_load FORKS`.

The parts are real, and prometheus_client is in its multiprocess mode, as FastDeploy has it. Each child
takes every lock, observes, logs, and looks for sockets. Prints the number of forks, unless a child failed.
"""

import logging
import os
import shutil
import sys
import tempfile
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace

DIRECTORY = tempfile.mkdtemp(prefix="kv-")
os.environ.update(PROMETHEUS_MULTIPROC_DIR=DIRECTORY, TMPDIR=DIRECTORY)

from prometheus_client import REGISTRY, Gauge, Histogram, values  # noqa: E402

from fastdeploy_kvcache_v1 import forks  # noqa: E402
from fastdeploy_kvcache_v1.config import KVCacheConfig  # noqa: E402
from fastdeploy_kvcache_v1.contract.messages import SWAP_OUT, CopyResult, WorkerReport  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.metrics import CacheMetricsPublisher  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.uncached import Uncached  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.overlay import Overlay  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for  # noqa: E402
from fastdeploy_kvcache_v1.lab.fastdeploy_cpu.token_channel import TokenReceiver  # noqa: E402
from fastdeploy_kvcache_v1.link.engine import EngineLink  # noqa: E402
from fastdeploy_kvcache_v1.link.messages import MessageTypes  # noqa: E402
from fastdeploy_kvcache_v1.link.place import socket_path  # noqa: E402
from fastdeploy_kvcache_v1.link.rank import RankLink  # noqa: E402
from fastdeploy_kvcache_v1.link.reports import Reports  # noqa: E402
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager  # noqa: E402
from fastdeploy_kvcache_v1.scheduler.cache_stats import CacheStats, Counters  # noqa: E402
from tests.forked import ended_well, start  # noqa: E402

MOST_ALIVE = 4
WAIT_S = 60
SWITCH_S = 1e-4
"""Threads give way often, also inside a lock."""

logger = logging.getLogger("fastdeploy_kvcache_v1.test")
log_file = logging.FileHandler("/dev/null")
host_gauge = Gauge("host_gauge", "as FastDeploy's schedule loop sets many of them", ["of"])
histogram = Histogram("host_histogram", "as an API process observes")


def repeat(work):
    while True:
        work()


def start_load() -> Overlay:
    """Threads for ever."""
    names = [name for name in CacheStats.__dataclass_fields__ if name != "counters"]
    misses = CacheManager(KVCacheConfig(4)).misses
    manager = SimpleNamespace(stats=lambda: CacheStats(counters=Counters(), **dict.fromkeys(names, 1)), misses=misses)
    overlay = Overlay(table_for("2.6"), Path(DIRECTORY))
    publisher = CacheMetricsPublisher(SimpleNamespace(manager=manager, uncached=Uncached()), overlay)
    publisher.reports = Reports(1)
    engine = EngineLink(socket_path(1), 1, MessageTypes(), word="")
    engine.listen({WorkerReport: publisher.reports.put}, lambda rank: None)
    link = RankLink(socket_path(1), 0, 1, MessageTypes(), word="")
    link.listen({})
    receiver = TokenReceiver(Path(DIRECTORY, "tokens"))
    steps = count()

    def report():
        link.send(WorkerReport((CopyResult(next(steps), *SWAP_OUT, 1, 1, 0.0),)))
        receiver.receive(wait=False)

    for work in (
        publisher.publish_now,
        lambda: host_gauge.labels("x").set(1),
        lambda: logger.info("x" * 200),
        overlay.states,
        report,
    ):
        threading.Thread(target=repeat, args=[work], daemon=True).start()
    return overlay


def use_all(overlay: Overlay) -> None:
    """By a child."""
    locks = {
        "of all values of prometheus_client": forks.lock_of_values(),
        "of prometheus_client's registry": REGISTRY._lock,
        **{f"of {each}": each._lock for each in REGISTRY._names_to_collectors.values() if hasattr(each, "_lock")},
        "of logging": logging._lock,
        "of a log file's handler": log_file.lock,
        "of the overlay": overlay._lock,
    }
    for name, lock in locks.items():
        assert lock.acquire(timeout=WAIT_S), f"a child waits for the lock {name}"
        lock.release()
    histogram.observe(1)
    host_gauge.labels("child").set(1)
    logger.info("child")
    open_files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
    assert not [each for each in open_files if each.startswith("socket:")], "a child has sockets"


def main(num_forks: int) -> int:
    forks.guard()
    assert values.ValueClass._multiprocess
    logger.addHandler(log_file)
    logger.setLevel(logging.INFO)
    sys.setswitchinterval(SWITCH_S)
    overlay = start_load()
    alive: list[int] = []
    for _ in range(num_forks):
        if len(alive) == MOST_ALIVE and not ended_well(alive.pop(0)):
            return 1
        alive.append(start(use_all, overlay))
    if not ended_well(*alive):
        return 1
    print(f"{num_forks} forks", flush=True)
    return 0


if __name__ == "__main__":
    status = main(int(sys.argv[1]))
    shutil.rmtree(DIRECTORY, ignore_errors=True)  # its threads still use it
    os._exit(status)
