"""Patches of the GPU worker. They are thin: decisions are in `WorkerCache`, layouts in `backends`."""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ...worker.cuda import trial
from ...worker.cuda.runtime import CudaRuntime, use_device
from ...worker.runtime import Runtime
from .. import Args, Kwargs, Wrapped, settings
from ..backends import DSA, MLA, cache_backend
from ..link import ReportSender, rank_link
from ..overlay import overlay
from ..overlay.table import Where
from ..swap_space import draft_tokens, has_draft_layer, host_layout
from .latent_prefix import PREFIX
from .storage import rank_storage
from .worker_cache import DRAFT, MAIN, OffsetCounter, WorkerCache

COUNTER = "_kvcache_v1_counter"
"""Attribute of a `ForwardMeta`: the `LayerDoneCounter` that this pass's attention waits for."""

_worker_cache: WorkerCache | None = None


def worker_cache() -> WorkerCache:
    """The `WorkerCache` of this process. A worker process has one model runner."""
    assert _worker_cache is not None, "the model runner has not been made yet"
    return _worker_cache


def init_runner(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `GPUModelRunner.__init__`. Our cache is made first: the proposer that FastDeploy makes asks for it."""
    global _worker_cache
    overlay.active().require_complete(Where.WORKER)
    config = kwargs["fd_config"] if "fd_config" in kwargs else args[0]
    from fastdeploy import envs

    cache = config.cache_config
    link = rank_link(config)
    storage = rank_storage(
        config,
        link,
        device_id=int(_argument(args, kwargs, 2, "device_id", 0)),
        on_gpu=True,
        enter_thread=_enter_current_device,
    )
    num_host_blocks = int(cache.num_cpu_blocks or 0) if cache.enable_prefix_caching else 0
    if num_host_blocks:
        # The trial of copies runs in other processes, which need room on the GPU and must be gone before FastDeploy
        # measures its free memory. Once the model is loaded there may be no room.
        trial.rates_of(_current_device(), _row_bytes(config, envs.FD_ATTENTION_BACKEND))
    _worker_cache = WorkerCache(
        num_host_blocks=num_host_blocks,
        block_size=int(cache.block_size),
        make_runtime=_current_gpu,
        parts=(MAIN, DRAFT) if has_draft_layer(config) else (MAIN,),
        draft_tokens=draft_tokens(config),
        expected_block_bytes=settings.host_block_bytes(),
        keep_host_memory=not envs.FD_ENABLE_SWAP_SPACE_CLEARING,
        tell_copies=ReportSender(link.send),
        storage=storage,
    )
    link.listen({} if storage is None else storage.handlers)
    wrapped(*args, **kwargs)


def _row_bytes(config: Any, attention_backend: str) -> list[int]:
    """Row bytes of each role, as the engine computes them. Empty if unknown before the tensors are made."""
    try:
        return [role.block_bytes for role in host_layout(config, attention_backend).roles]
    except ConfigError:
        return []


def _current_gpu() -> Runtime:
    return CudaRuntime(_current_device())


def _current_device() -> int:
    import paddle

    return int(paddle.device.get_device().rpartition(":")[2])


def _enter_current_device() -> None:
    """Set the device of a new thread, which starts with the first device of the process."""
    use_device(_current_device())


def insert_tasks(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `GPUModelRunner.insert_tasks_v1`: the batch's copies start first."""
    worker_cache().receive(kwargs["req_dicts"] if "req_dicts" in kwargs else args[0])
    return wrapped(*args, **kwargs)


def execute_model(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `GPUModelRunner.execute_model`. When it returns, the pass has been submitted."""
    result = wrapped(*args, **kwargs)
    worker_cache().end_forward()
    return result


def execute_model_or_idle(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """As `execute_model`, for a release whose idle worker goes on calling it, with a token count of 0."""
    result = wrapped(*args, **kwargs)
    worker_cache().end_forward(is_idle=instance.current_launch_token_num == 0)
    return result


def not_need_stop(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `GPUModelRunner.not_need_stop`, the only method that an idle worker of 2.5 calls, in a loop."""
    is_busy = wrapped(*args, **kwargs)
    if not is_busy:  # with overlapping passes, a row may have begun since
        worker_cache().report_while_idle(is_idle=not instance.enable_overlap_schedule)
    return is_busy


def initialize_forward_meta(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `GPUModelRunner.initialize_forward_meta`, which decides how the pass runs.

    Captured and static graphs skip the Python code of attention layers, so they wait for all layers at once.
    """
    wrapped(*args, **kwargs)
    if kwargs.get("is_dummy_or_profile_run", args[0] if args else False):
        return
    meta, graphs = instance.forward_meta, instance.fd_config.graph_opt_config
    plain = not meta.step_use_cudagraph and graphs.graph_opt_level == 0
    setattr(meta, COUNTER, worker_cache().begin_forward(layer_by_layer=plain))


def initialize_draft_forward_meta(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> None:
    """Wraps `MTPProposer._initialize_forward_meta`. One swap-in has the main model's layers, then the draft's."""
    wrapped(*args, **kwargs)
    cache = worker_cache()
    if _argument(args, kwargs, 1, "is_dummy_run", False) or (counter := cache.current_counter) is None:
        return
    if instance.forward_meta.step_use_cudagraph:
        counter.wait_all()
    else:
        setattr(instance.forward_meta, COUNTER, OffsetCounter(counter, cache.num_main_layers))


def _argument(args: Args, kwargs: Kwargs, position: int, name: str, default: Any) -> Any:
    return args[position] if len(args) > position else kwargs.get(name, default)


def split_batch(wrapped: Wrapped, instance: Any, args: Args, kwargs: Kwargs) -> Any:
    """Wraps `split_batch_decoder_layers`: each half batch waits for the copies of the whole batch."""
    halves = wrapped(*args, **kwargs)
    whole = _argument(args, kwargs, 0, "forward_meta", None)
    if getattr(whole, PREFIX, None) is not None:
        raise RuntimeError("MLA prompts behind a cached prefix cannot run in half batches: report this")
    counter = getattr(whole, COUNTER, None)
    for meta in halves if counter is not None else ():
        setattr(meta, COUNTER, counter)
    return halves


def make_attention_forward(original: Wrapped) -> Wrapped:
    """Replaces `Attention.forward` by a plain function, because it runs per layer and graph compilers read it.

    The backend reads a cached prefix after the wait. It learns the layer from `prefix.layer`.
    """

    def forward(
        self: Any,
        q: Any = None,
        k: Any = None,
        v: Any = None,
        qkv: Any = None,
        compressed_kv: Any = None,
        k_pe: Any = None,
        forward_meta: Any = None,
    ) -> Any:
        counter = getattr(forward_meta, COUNTER, None)
        if counter is not None:
            counter.wait_for_layer(self.layer_id)
        prefix = getattr(forward_meta, PREFIX, None)
        if prefix is not None:
            prefix.layer = self
        return original(self, q, k, v, qkv, compressed_kv, k_pe, forward_meta)

    return forward


def make_indexer_forward(original: Wrapped) -> Wrapped:
    """Replaces `Indexer.forward`, which reads its cache before the layer's attention runs. Its other parameters depend
    on the release; the patch table names them.
    """

    def forward(self: Any, forward_meta: Any, *inputs: Any, **named: Any) -> Any:
        counter = getattr(forward_meta, COUNTER, None)
        if counter is not None:
            counter.wait_for_layer(self.layer_id)
        return original(self, forward_meta, *inputs, **named)

    return forward


# ---- cache tensors


def make_initialize_kv_cache(original: Wrapped) -> Wrapped:
    """Replaces `GPUModelRunner.initialize_kv_cache`: the worker makes its tensors and waits for no other process."""

    def initialize_kv_cache(self: Any, profile: bool = False) -> None:
        import paddle
        from fastdeploy import envs

        self.mla_cache = envs.FD_ATTENTION_BACKEND == MLA
        self.dsa_cache = envs.FD_ATTENTION_BACKEND == DSA
        quant_type = "uint8" if self.dsa_cache else _quant_type(self.quant_config)
        rank = self.local_rank % self.parallel_config.tensor_parallel_size
        tensors = _make_tensors(
            self, MAIN, self.num_gpu_blocks, quant_type=quant_type, rank=rank, first_layer=0, keep=not profile
        )
        self.cache_kvs_map.update(tensors)
        self.share_inputs["caches"] = list(tensors.values())
        if not profile:
            self.cache_ready_signal.value[rank] = 1
        paddle.device.cuda.empty_cache()

    return initialize_kv_cache


def make_initialize_draft_kv_cache(original: Wrapped) -> Wrapped:
    """Replaces `MTPProposer.initialize_kv_cache`."""

    def initialize_kv_cache(self: Any, main_model_num_blocks: int, profile: bool = False) -> None:
        self.num_gpu_blocks = int(main_model_num_blocks * self.speculative_config.num_gpu_block_expand_ratio)
        self.cache_kvs = {}
        tensors = _make_tensors(
            self,
            DRAFT,
            self.num_gpu_blocks,
            quant_type=_quant_type(self.quant_config),
            rank=self.local_rank % self.parallel_config.tensor_parallel_size,
            first_layer=self.num_main_model_layers,
            keep=not profile,
        )
        self.cache_kvs_map.update(tensors)
        self.model_inputs["caches"] = list(tensors.values())
        self._empty_cache()

    return initialize_kv_cache


def _make_tensors(
    runner: Any, part: str, num_blocks: int, *, quant_type: str | None, rank: int, first_layer: int, keep: bool
) -> dict[str, Any]:
    """`keep`: False for the profiling run, whose tensors are not registered."""
    backend, num_layers = runner.attn_backends[0], runner.model_config.num_hidden_layers
    dtype = runner.model_config.dtype
    tensors: dict[str, Any] = backend.create_kv_cache(
        num_blocks,
        num_layers,
        dtype=dtype,
        quant_type=quant_type,
        rank=rank,
        device=runner.device_id,
        first_layer=first_layer,
    )
    if keep:
        layout = cache_backend(backend, num_layers, dtype=dtype, quant_type=quant_type).layout
        worker_cache().register(part, layout, tensors, num_blocks)
    return tensors


def _quant_type(quant_config: Any) -> str | None:
    return getattr(quant_config, "kv_cache_quant_type", None)


def make_clear_cache(original: Wrapped) -> Wrapped:
    """Replaces `GPUModelRunner.clear_cache`: waits for copies, frees the tensors, and waits for no other process."""

    def clear_cache(self: Any, profile: bool = False) -> None:
        import paddle

        if not profile:
            worker_cache().unregister(MAIN)
        self.cache_kvs_map.clear()
        self.share_inputs.pop("caches", None)
        if self.forward_meta is not None:
            self.forward_meta.clear_caches()
        paddle.device.cuda.empty_cache()

    return clear_cache


def make_clear_draft_cache(original: Wrapped) -> Wrapped:
    """Replaces `MTPProposer.clear_mtp_cache`."""

    def clear_mtp_cache(self: Any, profile: bool = False) -> None:
        if not profile:
            worker_cache().unregister(DRAFT)
        self.cache_kvs_map.clear()
        self.model_inputs.pop("caches", None)
        if self.forward_meta is not None:
            self.forward_meta.caches = None

    return clear_mtp_cache
