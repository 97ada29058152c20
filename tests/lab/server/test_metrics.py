import logging
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.contract.messages import CopyPath
from fastdeploy_kvcache_v1.lab.server.engine.engine_core import EngineCore
from fastdeploy_kvcache_v1.lab.server.engine.remote_prefills import RemotePrefills
from fastdeploy_kvcache_v1.lab.server.field_names import FieldCheck
from fastdeploy_kvcache_v1.lab.server.metrics import Metrics
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.storage.engine.counters import StorageCounters
from fastdeploy_kvcache_v1.storage.engine.tier import StorageTier
from fastdeploy_kvcache_v1.telemetry.metrics import PREFIX, Kind
from fastdeploy_kvcache_v1.telemetry.trace_recorder import TraceRecorder
from tests.telemetry.metrics_page import sources


def whole_core(tmp_path):
    """An engine with every part that is exported."""
    recorder = TraceRecorder(tmp_path / "trace", 16, log=logging.getLogger())
    recorder.close()
    core = EngineCore(
        CacheManager(KVCacheConfig(8, block_size=16)),
        lambda batch: None,
        max_num_seqs=1,
        max_num_batched_tokens=16,
        remote=RemotePrefills(None, [None], None, block_size=16, vocab_size=2),
        recorder=recorder,
        num_ranks=2,
    )
    core.storage = StorageTier.__new__(StorageTier)
    core.storage.counters = StorageCounters()
    core.storage._fetches = SimpleNamespace(num_waiting_requests=1, is_left_alone=True)
    core.counters.copies[1].paths = (CopyPath("in", "runs"),)
    return core


def samples(metrics):
    families = text_string_to_metric_families(metrics.render().decode())
    return {
        (each.name.removeprefix(PREFIX), *sorted(each.labels.items())): each.value
        for f in families
        for each in f.samples
    }


def test_every_metric_that_the_docs_have_of_this_server_is_shown(tmp_path):
    core = whole_core(tmp_path)
    metrics = Metrics(core, FieldCheck(strict=False))
    core.observe_first_token(0.25)
    core.storage.observe_latency("load", 0.25)
    here = [
        metric for each in sources() if each.servers != "FastDeploy" for metric in (*each.numbers, *each.histograms)
    ]
    ends = {Kind.COUNTER: "_total", Kind.GAUGE: "", Kind.HISTOGRAM: "_count"}
    assert {metric.name + ends[metric.kind] for metric in here} - {name for name, *_ in samples(metrics)} == set()


def test_numbers_of_a_rank_have_its_number(tmp_path):
    core = whole_core(tmp_path)
    core.counters.copies[1].swap_in.blocks = 7
    shown = samples(Metrics(core, FieldCheck(strict=False)))
    blocks = [shown["swap_blocks_total", ("direction", "in"), ("rank", str(rank))] for rank in range(2)]
    assert blocks == [0, 7]
    path = ("direction", "in"), ("path", "runs"), ("rank", "1"), ("reason", "")
    assert {name: value for name, value in shown.items() if name[0] == "copy_path"} == {("copy_path", *path): 1}
