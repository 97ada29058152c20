"""FastDeploy's real ResourceManagerV1 with the configuration that it needs. Inside a FastDeploy process only."""

from dataclasses import asdict
from types import SimpleNamespace

from fastdeploy_kvcache_v1 import plugin

plugin.activate()  # what the .pth file does, for a checkout that is not installed

import fastdeploy  # noqa: E402, F401  (first: its modules import each other in a circle)
from fastdeploy import envs  # noqa: E402
from fastdeploy.config import CacheConfig, FDConfig, ParallelConfig  # noqa: E402
from fastdeploy.engine.args_utils import EngineArgs  # noqa: E402
from fastdeploy.engine.request import Request, RequestMetrics, RequestStatus  # noqa: E402
from fastdeploy.engine.sched.resource_manager_v1 import ResourceManagerV1  # noqa: E402
from fastdeploy.scheduler.config import SchedulerConfig  # noqa: E402

IS_26 = hasattr(RequestStatus, "RUNNING_PREFILL")
SEATS = 6
BLOCK_SIZE = 8


def make_manager(
    num_device_blocks,
    num_host_blocks,
    policy,
    *,
    threshold=2,
    block_size=BLOCK_SIZE,
    seats=SEATS,
    max_tokens=64,
    role="mixed",
    caching=True,
    order=None,
    whole_items=None,
):
    """ResourceManagerV1 with the configuration objects it needs, made as FastDeploy's own tests make them."""
    engine_args = EngineArgs(
        max_num_seqs=seats,
        num_gpu_blocks_override=num_device_blocks,
        max_num_batched_tokens=max_tokens,
        write_policy=policy,
        **({"write_through_threshold": threshold} if plugin.is_enabled() else {}),
    )
    if envs.ENABLE_V1_KVCACHE_SCHEDULER == 0:  # FastDeploy switches it off where there is no GPU
        envs.__dict__.pop("ENABLE_V1_KVCACHE_SCHEDULER", None)
        envs.environment_variables["ENABLE_V1_KVCACHE_SCHEDULER"] = lambda: 1
    arguments = {**asdict(engine_args), "num_cpu_blocks": num_host_blocks}
    cache = CacheConfig(arguments)
    cache.block_size = block_size
    cache.enc_dec_block_num = 2
    cache.prealloc_dec_block_slot_num_threshold = 2
    cache.enable_prefix_caching = cache.enable_output_caching = caching
    cache.eviction_policy = order or getattr(cache, "eviction_policy", None)
    if whole_items is not None:
        cache.disable_chunked_mm_input = whole_items
    cache.max_encoder_cache = cache.max_processor_cache = 0
    cache.bytes_per_token_per_layer = 1
    cache.kv_cache_ratio = 1.0
    model = SimpleNamespace(
        model="/nowhere",
        enable_mm=False,
        max_model_len=max(block_size * 16, max_tokens),
        architectures=["test_model"],
        mm_max_tokens_per_item=None,
        version=None,
        print=print,
    )
    scheduler = SchedulerConfig(arguments)
    scheduler.splitwise_role = role
    config = FDConfig(
        model_config=model,
        cache_config=cache,
        parallel_config=ParallelConfig(arguments),
        graph_opt_config=engine_args.create_graph_optimization_config(),
        speculative_config=SimpleNamespace(method=None, num_speculative_tokens=1),
        scheduler_config=scheduler,
        test_mode=True,
    )
    return ResourceManagerV1(max_num_seqs=seats, config=config, tensor_parallel_size=1, splitwise_role=role)


def make_request(request_id, prompt, items=None):
    request = Request.from_dict({"request_id": request_id, "multimodal_inputs": {} if items is None else items})
    request.prompt_token_ids = list(prompt)
    request.prompt_token_ids_len = request.need_prefill_tokens = len(prompt)
    request.output_token_ids = []
    request.disaggregate_info = {}
    request.metrics = RequestMetrics()
    return request
