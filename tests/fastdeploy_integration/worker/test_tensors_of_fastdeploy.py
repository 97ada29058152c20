"""The worker makes and drops the tensors of main and draft model where FastDeploy would. FAKE runners and modules."""

from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration import settings
from fastdeploy_kvcache_v1.fastdeploy_integration.backends import create_kv_cache
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import Where
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import patches
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.worker_cache import DRAFT, MAIN
from tests.fastdeploy_integration.fd_configs import fd_config

# ---- backends with the attributes and shapes of FastDeploy's


class AppendAttentionBackend:
    kv_num_heads, head_dim, block_size = 2, 8, 4

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        shape = [max_num_blocks, 2, 4, 4 if kv_cache_quant_type == "int4_zp" else 8]
        return shape, shape


class MLAAttentionBackend:
    kv_lora_rank, qk_rope_head_dim, block_size = 512, 64, 4

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        return [max_num_blocks, 1, 4, 576], []


class DSAAttentionBackend:
    kv_lora_rank, qk_rope_head_dim, index_head_dim, block_size = 512, 64, 128, 4

    def get_kv_cache_shape(self, max_num_blocks, kv_cache_quant_type=None):
        return [max_num_blocks, 1, 4, 656], [], [max_num_blocks, 4, 132]


@pytest.mark.parametrize(
    ("backend", "quant_type", "shapes", "dtypes"),
    [
        (AppendAttentionBackend, None, [[3, 2, 4, 8]] * 2, ["float32"] * 2),
        (AppendAttentionBackend, "int8", [[3, 2, 4, 8]] * 2, ["uint8"] * 2),
        (AppendAttentionBackend, "int4_zp", [[3, 2, 4, 4]] * 2, ["uint8"] * 2),
        (
            AppendAttentionBackend,
            "block_wise_fp8",
            [[3, 2, 4, 8]] * 2 + [[3, 2, 4]] * 2,
            ["uint8", "uint8", "float32", "float32"],
        ),
        (MLAAttentionBackend, None, [[3, 1, 4, 576]], ["float32"]),
        (DSAAttentionBackend, "uint8", [[3, 1, 4, 656], [3, 4, 132]], ["uint8"] * 2),
    ],
)
def test_tensors_of_each_layout(backend, quant_type, shapes, dtypes):
    made = create_kv_cache(backend(), 3, 2, dtype="float32", quant_type=quant_type, rank=1, device=5, first_layer=7)
    tensors = list(made.values())
    assert [tensor.shape for tensor in tensors] == shapes * 2
    assert [str(tensor.dtype).rpartition(".")[2] for tensor in tensors] == dtypes * 2
    assert not any(tensor.numpy().any() for tensor in tensors)
    assert next(iter(made)) == "key_caches_7_rank1.device5"
    assert next(reversed(made)).rpartition("_")[0].endswith("_8")


def test_layouts_that_kernels_do_not_read_are_refused():
    with pytest.raises(ConfigError, match="attention family mla caches no scales"):
        create_kv_cache(MLAAttentionBackend(), 1, 1, dtype="bfloat16", quant_type="block_wise_fp8")


def test_a_backend_whose_shape_drifted_is_refused():
    backend = AppendAttentionBackend()
    backend.get_kv_cache_shape = lambda max_num_blocks, kv_cache_quant_type: ([1, 4, 2, 8], [1, 4, 2, 8])
    with pytest.raises(ConfigError, match=r"AppendAttentionBackend asks for cache blocks of \[\(1, 4, 2, 8\)"):
        create_kv_cache(backend, 1, 1, dtype="bfloat16")


# ---- where FastDeploy would make and drop them


@pytest.fixture
def emptied(install, monkeypatch):
    """`(envs, emptied)`: how often memory went back to the GPU."""
    envs, emptied = SimpleNamespace(FD_ATTENTION_BACKEND="APPEND_ATTN", FD_ENABLE_SWAP_SPACE_CLEARING=False), []
    install({"fastdeploy": {"envs": envs}})
    monkeypatch.setattr("paddle.device.cuda.empty_cache", lambda: emptied.append(1))
    return envs, emptied


@pytest.fixture
def cache(make_cache, monkeypatch):
    made = make_cache((MAIN, DRAFT))
    monkeypatch.setattr(patches, "worker_cache", lambda: made)
    return made


def runner(backend=AppendAttentionBackend, **fields):
    backend = type(backend.__name__, (backend,), {"create_kv_cache": create_kv_cache})()
    return SimpleNamespace(
        attn_backends=[backend],
        model_config=SimpleNamespace(num_hidden_layers=2, dtype="float32"),
        parallel_config=SimpleNamespace(tensor_parallel_size=2),
        quant_config=None,
        local_rank=3,
        device_id=5,
        num_gpu_blocks=6,
        forward_meta=None,
        cache_ready_signal=SimpleNamespace(value=np.zeros(2, np.int32)),
        cache_kvs_map={"of a run before": None},
        share_inputs={},
        **fields,
    )


def proposer():
    made = runner(
        num_main_model_layers=2,
        speculative_config=SimpleNamespace(num_gpu_block_expand_ratio=1.5),
        model_inputs={},
        _empty_cache=lambda: made.emptied.append(1),
        emptied=[],
    )
    made.model_config.num_hidden_layers = 1
    return made


@pytest.mark.parametrize("profile", [False, True])
def test_main_and_draft_tensors_are_made_and_dropped(emptied, cache, profile):
    """Those of the profiling run are not kept, and nobody hears that they are there."""
    main, draft = runner(), proposer()
    assert patches.make_initialize_kv_cache(None)(main, profile=profile) is None
    patches.make_initialize_draft_kv_cache(None)(draft, 6, profile=profile)
    names = [f"{role}_caches_{layer}_rank1.device5" for layer in range(3) for role in ("key", "value")]
    assert ["of a run before", *names[:4]] == list(main.cache_kvs_map)
    assert [tensor.shape for tensor in main.share_inputs["caches"]] == [[6, 2, 4, 8]] * 4
    assert names[4:] == list(draft.cache_kvs_map)[1:]
    assert [tensor.shape for tensor in draft.model_inputs["caches"]] == [[9, 2, 4, 8]] * 2
    assert (main.mla_cache, main.dsa_cache, draft.num_gpu_blocks) == (False, False, 9)
    assert list(main.cache_ready_signal.value) == [0, not profile]
    assert cache.has_host_tier is not profile
    assert (len(emptied[1]), len(draft.emptied)) == (1, 1)
    for each, clear in ((draft, patches.make_clear_draft_cache), (main, patches.make_clear_cache)):
        each.forward_meta = SimpleNamespace(caches="old", clear_caches=lambda: main.share_inputs.update(cleared=True))
        clear(None)(each, profile=profile)
        assert each.cache_kvs_map == {}
    assert (main.share_inputs, draft.model_inputs) == ({"cleared": True}, {})
    assert draft.forward_meta.caches is None
    assert (cache.has_host_tier, len(emptied[1])) == (False, 2)


@pytest.mark.parametrize("part", [MAIN, DRAFT])
def test_copies_end_before_tensors_go_but_for_those_of_the_profiling_run(emptied, cache, part):
    main, draft = runner(), proposer()
    patches.make_initialize_kv_cache(None)(main)
    patches.make_initialize_draft_kv_cache(None)(draft, 6)
    clear, made = (patches.make_clear_cache, main) if part == MAIN else (patches.make_clear_draft_cache, draft)
    clear(None)(made, profile=True)
    assert cache.has_host_tier
    for _ in range(2):
        clear(None)(made)
        assert not cache.has_host_tier


@pytest.mark.parametrize(
    ("name", "backend", "quant_type", "dtype", "flags"),
    [
        ("APPEND_ATTN", AppendAttentionBackend, "int8", "uint8", (False, False)),
        ("MLA_ATTN", AppendAttentionBackend, None, "float32", (True, False)),
        ("DSA_ATTN", DSAAttentionBackend, None, "uint8", (False, True)),
    ],
)
def test_how_the_tensors_of_a_backend_are_stored(emptied, name, backend, quant_type, dtype, flags):
    emptied[0].FD_ATTENTION_BACKEND = name
    made = runner(backend)
    made.quant_config = quant_type and SimpleNamespace(kv_cache_quant_type=quant_type)
    patches.make_initialize_kv_cache(None)(made, profile=True)
    assert {str(tensor.dtype).rpartition(".")[2] for tensor in made.share_inputs["caches"]} == {dtype}
    assert (made.mla_cache, made.dsa_cache) == flags


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("given", "host_blocks", "parts", "draft_tokens", "rows"),
    [
        ({"num_key_value_heads": 2, "head_dim": 8}, 7, (MAIN,), 0, [128, 128]),
        ({"enable_prefix_caching": False}, 0, (MAIN,), 0, None),
        ({"num_cpu_blocks": None}, 0, (MAIN,), 0, None),
        ({"method": "mtp"}, 7, (MAIN, DRAFT), 2, []),
        ({"method": "ngram"}, 7, (MAIN,), 2, []),
    ],
)
def test_a_runner_has_its_cache_before_it_makes_its_proposer(
    emptied, monkeypatch, named, given, host_blocks, parts, draft_tokens, rows
):
    made, required, told, tried = [], [], [], []
    link = SimpleNamespace(send=None, listen=lambda handlers: None)
    monkeypatch.setattr(patches, "rank_link", lambda config: link)
    active = SimpleNamespace(require_complete=required.append)
    monkeypatch.setattr(overlay, "active", lambda: active)
    monkeypatch.setattr(patches, "_worker_cache", None)
    monkeypatch.setattr(patches, "WorkerCache", lambda **settings: made.append(settings) or "the cache")
    monkeypatch.setattr(patches, "rank_storage", lambda *_, device_id, on_gpu, **__: Storage([device_id, on_gpu]))
    monkeypatch.setattr(patches.trial, "rates_of", lambda *given: tried.append((*given, patches._worker_cache, *told)))
    monkeypatch.setattr(patches, "_current_device", lambda: 5)
    emptied[0].FD_ATTENTION_BACKEND = "APPEND_ATTN"
    monkeypatch.setenv(settings.BLOCK_BYTES_VARIABLE, "4096")
    args, kwargs = ((), {"fd_config": fd_config(**{"num_cpu_blocks": 7, **given}), "device_id": 6})
    if not named:
        args, kwargs = (kwargs["fd_config"], "model", 6), {}
    patches.init_runner(lambda *_, **__: told.append(patches.worker_cache()), None, args, kwargs)
    assert (required, told) == ([Where.WORKER], ["the cache"])
    (chosen,) = made
    assert (chosen["num_host_blocks"], chosen["parts"], chosen["draft_tokens"]) == (host_blocks, parts, draft_tokens)
    assert (chosen["block_size"], chosen["expected_block_bytes"], chosen["keep_host_memory"]) == (4, 4096, True)
    assert chosen["storage"] == [6, True]
    assert tried == ([(5, rows, None)] if host_blocks else []), "copies are tried before the model takes the memory"


class Storage(list):
    """FAKE: where it was made."""

    handlers = {}  # noqa: RUF012  never written
