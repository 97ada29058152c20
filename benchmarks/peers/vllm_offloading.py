"""vLLM's KVCacheManager with the scheduler's half of its CPU offloading, in the order of its scheduler's calls.

Loads are asynchronous, its default: a request that loads takes two steps, and its copies end between them.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from contender import Copies
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler
from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
from vllm.v1.kv_offload.config import OffloadingGroupConfig
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus
from vllm_manager import NO_ROOM, VLLM


class Offloading(VLLM):
    """`kind` is the eviction policy of the host tier, one of vLLM's names."""

    def __init__(self, device: int, host: int, block_size: int, kind: str) -> None:
        super().__init__(device, 0, block_size, "sha256")
        group = OffloadingGroupConfig(tokens_per_block=block_size, layer_names=("layer",), group_id=0)
        spec = SimpleNamespace(
            config=SimpleNamespace(groups=(group,)), tokens_per_block=(block_size,), tokens_per_hash=block_size,
            blocks_per_chunk=1, offload_prompt_only=True, extra_config={},
            kv_events_config=SimpleNamespace(enable_kv_cache_events=False, self_describing_kv_events=False),
            get_manager=lambda: CPUOffloadingManager(host, cache_policy=kind),
        )  # fmt: skip
        engine = SimpleNamespace(
            cache_config=SimpleNamespace(prefix_cache_retention_interval=None, enable_prefix_caching=True),
            parallel_config=SimpleNamespace(world_size=1, decode_context_parallel_size=1), speculative_config=None,
        )  # fmt: skip
        self.connector = OffloadingConnectorScheduler(spec, engine, self.manager.kv_cache_config)
        self.ended: set[str] = set()
        self.planned: list[Copies] = []

    def arrive(self, number: int, tokens: list[int]) -> Request:
        self.connector.get_stats()  # else they grow
        return super().arrive(number, tokens)

    def start(self, request: Request) -> None:
        manager, connector = self.manager, self.connector
        connector.on_new_request(request)
        blocks, found, _ = manager.get_computed_blocks(request)
        loaded, _ = connector.get_num_new_matched_tokens(request, found)
        request.num_matched = found + loaded
        if loaded:
            self._load(request, found, loaded, blocks)
            found, blocks = 0, None  # the request has them
        new = request.num_tokens - max(request.num_computed_tokens, found)
        assert manager.allocate_slots(request, new, found, blocks) is not None, NO_ROOM
        connector.update_state_after_alloc(request, manager.get_blocks(request.request_id), 0)

    def _load(self, request: Request, found: int, loaded: int, blocks: Any) -> None:
        """The step in which a request only waits for its load."""
        manager, matched = self.manager, found + loaded
        slots = manager.allocate_slots(
            request, 0, found, blocks, num_external_computed_tokens=loaded, delay_cache_blocks=True
        )
        assert slots is not None, NO_ROOM
        self.connector.update_state_after_alloc(request, manager.get_blocks(request.request_id), loaded)
        self._step(SchedulerOutput.make_empty())
        manager.cache_blocks(request, matched)
        request.num_computed_tokens = min(matched, request.num_tokens - 1)

    def commit(self, request: Request) -> None:
        """Blocks to store are chosen before the step computes them, and copied afterwards."""
        output = SchedulerOutput.make_empty()
        output.scheduled_new_reqs = [NewRequestData.from_request(request, request.table)]
        output.num_scheduled_tokens = {request.request_id: request.num_tokens - request.num_computed_tokens}
        self._step(output)
        super().commit(request)

    def _step(self, output: SchedulerOutput) -> None:
        """The end of a step in the scheduler, and a worker that copies at once."""
        output.finished_req_ids, self.ended = self.ended, set()
        planned = self.connector.build_connector_meta(output)
        done = OffloadingWorkerMetadata()
        for is_out, jobs in ((False, planned.load_jobs), (True, planned.store_jobs)):
            for number, job in jobs.items():
                done.mark_completed(number)
                self.planned.append(Copies(is_out, job.src_spec.block_ids, job.dst_spec.block_ids))
        self.connector.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=done))

    def finish(self, request: Request) -> None:
        request.status = RequestStatus.FINISHED_STOPPED
        self.connector.request_finished(request)
        super().finish(request)
        self.ended.add(request.request_id)

    def table(self, request: Request) -> tuple[list[int], int]:
        request.table = self.manager.get_block_ids(request.request_id)
        return super().table(request)

    def copies(self) -> Iterable[Copies]:
        planned, self.planned = self.planned, []
        return planned


CONTENDER = Offloading
