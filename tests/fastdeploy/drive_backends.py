"""Run inside a FastDeploy process without a GPU: its real attention backends and, over FAKE custom ops, its real model
runner and proposer classes. Only what allocates is run; no kernel is.
"""

import importlib
import importlib.util
import os
from types import ModuleType, SimpleNamespace

from fastdeploy_kvcache_v1 import plugin

plugin.activate()

import paddle  # noqa: E402

import fastdeploy  # noqa: E402, F401
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Where  # noqa: E402
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import patches as worker_patches  # noqa: E402
from fastdeploy_kvcache_v1.worker.runtime import CpuRuntime  # noqa: E402

ATTENTION = "fastdeploy.model_executor.layers.attention"
FIELDS = {
    "kv_num_heads": 2,
    "head_dim": 16,
    "block_size": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "index_head_dim": 128,
    "quant_block_size": 128,
}
QUANT_TYPES = (None, "int8", "float8_e4m3fn", "block_wise_fp8", "int8_zp", "int4_zp", "float8_e4m3fn_zp")


def backend_classes():
    names = {
        "append_attn_backend": "AppendAttentionBackend",
        "flash_attn_backend": "FlashAttentionBackend",
        "flash_mask_attn_backend": "FlashMaskAttentionBackend",
        "moba_attention_backend": "PlasAttentionBackend",
        "block_multihead_attn_backend": "BlockAttentionBackend",
        "mla_attention_backend": "MLAAttentionBackend",
        "dsa_attention_backend": "DSAAttentionBackend",
    }
    if importlib.util.find_spec(f"{ATTENTION}.dsa_attention_backend") is None:
        del names["dsa_attention_backend"]
    return {name: getattr(importlib.import_module(f"{ATTENTION}.{module}"), name) for module, name in names.items()}


def make(backend_class):
    """Without the constructor, which asks for a GPU; with the attributes it would have set."""
    backend = object.__new__(backend_class)
    vars(backend).update(FIELDS)
    return backend


def show_layouts():
    for name, backend_class in backend_classes().items():
        for quant_type in ("uint8",) if name == "DSAAttentionBackend" else QUANT_TYPES:
            try:
                tensors = make(backend_class).create_kv_cache(3, 2, dtype="float32", quant_type=quant_type, device=4)
            except ValueError as error:
                print("LAYOUT", name, quant_type, "refused", error)
                continue
            assert not any(tensor.numpy().any() for tensor in tensors.values())
            print(
                "LAYOUT",
                name,
                quant_type,
                len(tensors),
                [list(each.shape) for each in tensors.values()][: len(tensors) // 2],
            )


class FakeOps(ModuleType):
    """Stands for the compiled custom ops: every name exists, none can be called."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def no_op(*_args, **_kwargs):
            raise AssertionError(f"the FAKE custom op {name} was called")

        return no_op


def import_worker_modules():
    gpu = importlib.import_module("fastdeploy.model_executor.ops.gpu")
    gpu.__class__ = FakeOps
    for row in overlay.active().table.rows:
        importlib.import_module(row.module)
    runner = importlib.import_module("fastdeploy.worker.gpu_model_runner").GPUModelRunner
    proposer = importlib.import_module("fastdeploy.spec_decode.mtp").MTPProposer
    return runner, proposer


def run_initialization(runner_class, proposer_class):
    """FastDeploy's order at start and at a weight update, with swap space and a draft model."""
    paddle.device.cuda.empty_cache = lambda: None
    common = {
        "quant_config": None,
        "local_rank": 1,
        "device_id": 3,
        "parallel_config": SimpleNamespace(tensor_parallel_size=2),
        "attn_backends": [make(backend_classes()["AppendAttentionBackend"])],
        "forward_meta": None,
    }
    runner = object.__new__(runner_class)
    signal = SimpleNamespace(value=[0, 0])
    vars(runner).update(
        common,
        num_gpu_blocks=6,
        model_config=SimpleNamespace(dtype="float32", num_hidden_layers=2),
        share_inputs={},
        cache_kvs_map={},
        cache_ready_signal=signal,
    )
    proposer = object.__new__(proposer_class)
    vars(proposer).update(
        common,
        model_config=SimpleNamespace(dtype="float32", num_hidden_layers=1),
        speculative_config=SimpleNamespace(num_gpu_block_expand_ratio=1.5),
        num_main_model_layers=2,
        model_inputs={},
        cache_kvs_map={},
        _empty_cache=lambda: None,
    )
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            num_cpu_blocks=5, block_size=4, enable_prefix_caching=True, kvcache_storage_backend=None
        ),
        speculative_config=SimpleNamespace(method="mtp", num_speculative_tokens=1),
        parallel_config=SimpleNamespace(local_engine_worker_queue_port=1, tensor_parallel_rank=0),
    )
    worker_patches.init_runner(lambda **_: None, None, (), {"fd_config": config})
    cache = worker_patches.worker_cache()
    runner.initialize_kv_cache(profile=True)
    proposer.initialize_kv_cache(main_model_num_blocks=6, profile=True)
    proposer.clear_mtp_cache(profile=True)
    runner.clear_cache(profile=True)
    assert signal.value == [0, 0]
    assert not cache.has_host_tier
    for order in ("start", "update"):
        steps = [runner.initialize_kv_cache, lambda: proposer.initialize_kv_cache(main_model_num_blocks=6)]
        for step in steps if order == "start" else reversed(steps):
            step()
        assert cache.has_host_tier
        assert signal.value == [0, 1]
        print("NAMES", order, *runner.cache_kvs_map, *proposer.cache_kvs_map)
        assert [list(each.shape) for each in runner.share_inputs["caches"]] == [[6, 2, 4, 16]] * 4
        assert [list(each.shape) for each in proposer.model_inputs["caches"]] == [[9, 2, 4, 16]] * 2
        proposer.clear_mtp_cache()
        runner.clear_cache()
        assert not cache.has_host_tier
        assert not runner.cache_kvs_map
        assert "caches" not in runner.share_inputs
    print("INITIALIZED")


def count_host_allocations(classes):
    """What FD_ENABLE_SWAP_SPACE_CLEARING says about host memory while the tensors are put away."""
    allocate = CpuRuntime.allocate_host
    for clearing in ("0", "1"):
        os.environ["FD_ENABLE_SWAP_SPACE_CLEARING"] = clearing
        sizes = []

        def counted(self, nbytes, *, shared, sizes=sizes):
            sizes.append(nbytes)
            return allocate(self, nbytes, shared=shared)

        CpuRuntime.allocate_host = counted
        run_initialization(*classes)
        print("HOST_MEMORY", clearing, *sizes)


def main():
    show_layouts()
    classes = import_worker_modules()
    overlay.active().require_complete(Where.WORKER)
    for row, state in overlay.active().states().items():
        print("ROW", row.target, state.name)
    worker_patches._current_gpu = CpuRuntime
    count_host_allocations(classes)


if __name__ == "__main__":
    main()
