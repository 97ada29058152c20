"""Every attention backend of FastDeploy for a GPU waits for a layer before it reads it, and reads that layer only.

`Attention.forward`, `Indexer.forward`, the backends and the forward metas of draft models are real. Kernels are FAKE:
they say which cache tensors they are given.
"""

import ast
import builtins
import importlib
import re
import sys
from pathlib import Path
from types import FunctionType, ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import paddle
import pytest

import fastdeploy
from fastdeploy.model_executor.layers.attention.attention import Attention
from fastdeploy_kvcache_v1.fastdeploy_integration.overlay import overlay
from fastdeploy_kvcache_v1.fastdeploy_integration.worker import patches as worker_patches
from tests.fastdeploy.inside.backends import FIELDS, backend_classes, import_worker_modules

NUM_LAYERS = 3
LAYER = 1
MAIN_LAYERS = 5
"""Of the main model, where the layers are those of a draft model."""
OUTPUTS = {
    "gqa_rope_write_cache": 4,
    "pre_cache_len_concat": 5,
    "get_mla_metadata": 2,
    "flash_mla_sparse_fwd": 3,
    "flash_mla_with_kvcache": 2,
}
"""Kernels whose outputs are unpacked, and how many there are."""
DEFAULTS = {
    "pd_disaggregation_mode": "",
    "rope_3d": False,
    "window_size": 0,
    "use_output": True,
    "num_heads": 2,
    "num_layers": NUM_LAYERS,
    "speculative_method": None,
    "attn_softmax_scale": 1.0,
    "flash_attn_kwargs": {},
    "sm_version": 90,
    "useless_tensor": None,
}


class Events:
    """What happens, in order: waits for a layer, reads of `forward_meta.caches`, kernels with cache tensors."""

    def __init__(self):
        self.seen, self.names = [], {}

    def wait_for_layer(self, layer):
        self.seen.append(["wait", layer])

    def kernel(self, name):
        def run(*args, **kwargs):
            given = [self.names[id(each)] for each in (*args, *kwargs.values()) if id(each) in self.names]
            if given:
                self.seen.append(["kernel", name, *given])
            return [MagicMock()] * OUTPUTS[name] if name in OUTPUTS else MagicMock()

        return run


class Caches(list):
    """Says what is taken out of it, and by which name."""

    def __init__(self, events, tensors):
        super().__init__(tensors.values())
        self.events, self.keys = events, list(tensors)
        events.names = {id(tensor): name for name, tensor in tensors.items()}

    def __getitem__(self, index):
        self.events.seen.append(["read", self.keys[index]])
        return super().__getitem__(index)


def fake_module(name, events):
    """All kernels there are."""
    module = sys.modules[name] = ModuleType(name)
    module.__path__, module.__getattr__ = [], events.kernel


def is_kernel(value):
    """Is it one that FastDeploy imported, could not import here, or that is FAKE already?"""
    module = getattr(value, "__module__", None) or ""
    is_fake = module in ("tests.fastdeploy.inside.backends", __name__)
    return value is None or (isinstance(value, FunctionType) and (is_fake or ".attention.ops" in module))


def fake_kernels(backend_class, events):
    """In the backend's module: every name that its forward functions use, and that is a kernel or missing."""
    module = sys.modules[backend_class.__module__]
    forwards = [value for name, value in vars(backend_class).items() if name.startswith("forward")]
    for name in {name for forward in forwards for name in forward.__code__.co_names}:
        if not hasattr(builtins, name) and is_kernel(vars(module).get(name)):
            setattr(module, name, events.kernel(name))
    if hasattr(module, "flash_attn_func"):
        module.flash_attn_func = events.kernel("flash_attn_func")
    if hasattr(module, "current_platform"):
        module.current_platform = SimpleNamespace(is_cuda=lambda: True)
    for name in ("flash_mla", "fastdeploy.model_executor.ops.gpu"):
        fake_module(name, events)


def make_backend(backend_class, events):
    """Without its constructor, which asks for a GPU."""
    answer = {"__getattr__": lambda self, name: DEFAULTS.get(name, 1)}
    answering = type(backend_class.__name__, (backend_class,), answer)
    backend = object.__new__(answering)
    metadata = MagicMock(kv_signal_data_list=[None] * NUM_LAYERS, _fuse_kernel_compute_dtype="bf16")
    vars(backend).update(FIELDS, attention_metadata=metadata, flash_attn_func=events.kernel("flash_attn_func"))
    return backend


def make_meta(backend, caches, phase):
    tokens = (4, 0) if phase == "prefill" else (0, 4)
    return MagicMock(
        attn_backend=backend,
        caches=caches,
        rope_already_applied=False,
        rotary_embs=SimpleNamespace(shape=[2, 1, 16, 1, 32]),
        attn_mask_offsets=None,
        max_len_tensor_cpu=paddle.to_tensor([4, *tokens, 0, 0, 4]),
    )


def make_layer(layer_id, quant_type):
    return MagicMock(
        layer_id=layer_id,
        cache_quant_type_str=quant_type or "none",
        sliding_window=0,
        use_neox_rotary_style=False,
        out_scale=-1.0,
        quant_max_bound=0.0,
    )


def attend(layer, meta, phase):
    """As models call their attention layers; latent attention has no keys and values where it decodes."""
    hidden = paddle.zeros([4, 64], dtype="bfloat16")
    new = hidden if phase == "prefill" else None
    latent = paddle.zeros([4, 64])
    Attention.forward(layer, q=hidden, k=new, v=new, qkv=hidden, compressed_kv=latent, k_pe=latent, forward_meta=meta)


def quant_types(name):
    if name == "DSAAttentionBackend":
        return ("uint8",)
    return (None,) if name in ("MLAAttentionBackend", "PlasAttentionBackend") else (None, "int8", "block_wise_fp8")


def run_backend(name, backend_class, quant_type, phase):
    events = Events()
    fake_kernels(backend_class, events)
    backend = make_backend(backend_class, events)
    tensors = backend.create_kv_cache(3, NUM_LAYERS, dtype="float32", quant_type=quant_type)
    meta = make_meta(backend, Caches(events, tensors), phase)
    setattr(meta, worker_patches.COUNTER, events)
    attend(make_layer(LAYER, quant_type), meta, phase)
    return events.seen


class Stop(Exception):
    """Enough was seen."""


def run_indexer(backend_class):
    indexer = importlib.import_module("fastdeploy.model_executor.models.deepseek_v3").Indexer
    events = Events()
    backend = make_backend(backend_class, events)
    tensors = backend.create_kv_cache(3, NUM_LAYERS, dtype="float32", quant_type="uint8")
    meta = make_meta(backend, Caches(events, tensors), "prefill")
    setattr(meta, worker_patches.COUNTER, events)
    layer = MagicMock(layer_id=LAYER, wq_b=MagicMock(side_effect=Stop))
    (row,) = (row for row in overlay.active().table.rows if row.qualname == "Indexer.forward")
    inputs = row.signature.count(",") - 1  # without self and the forward meta
    with pytest.raises(Stop):
        indexer.forward(layer, meta, *[None] * inputs)
    return events.seen


def run_draft(proposer_class, backend_class, *, is_dummy):
    """The proposer makes a forward meta as it does for each draft step; its layers count from 0 again."""
    events = Events()
    fake_kernels(backend_class, events)
    backend = make_backend(backend_class, events)
    backend.init_attention_metadata = lambda meta: None
    tensors = backend.create_kv_cache(3, 1, dtype="float32", first_layer=MAIN_LAYERS)
    inputs = MagicMock()
    given = {"caches": Caches(events, tensors)}
    inputs.__getitem__.side_effect = lambda name: given.get(name, MagicMock())
    inputs.__contains__.side_effect = lambda name: False
    proposer = object.__new__(proposer_class)
    vars(proposer).update(
        model_inputs=inputs,
        attn_backends=[backend],
        enable_mm=False,
        use_attn_mask_offset=False,
        draft_model_use_cudagraph=False,
    )
    worker_patches._worker_cache = SimpleNamespace(current_counter=events, num_main_layers=MAIN_LAYERS)
    proposer._initialize_forward_meta(is_dummy_run=is_dummy)
    proposer.forward_meta.rotary_embs = SimpleNamespace(shape=[2, 1, 16, 1, 32])
    proposer.forward_meta.max_len_tensor_cpu = paddle.to_tensor([1, 0, 4, 0, 0, 4])
    attend(make_layer(0, None), proposer.forward_meta, "decode")
    return events.seen


HAS_DSA, OF_DSA = "DSAAttentionBackend" in backend_classes(), {"DSAAttentionBackend", "Indexer"}
LATENT, KEY_VALUE = {"key"}, {"key", "value"}
ROLES = {
    "AppendAttentionBackend": KEY_VALUE,
    "FlashAttentionBackend": KEY_VALUE,
    "FlashMaskAttentionBackend": KEY_VALUE,
    "PlasAttentionBackend": KEY_VALUE,
    "MLAAttentionBackend": LATENT,
    "DSAAttentionBackend": LATENT,
    "Indexer": {"indexer"},
}
SCALED = {"key", "value", "key_scale", "value_scale"}
REFUSED = {"NATIVE_ATTN": "PaddleNativeAttnBackend"}
"""At start, before there is a backend. PLAS_ATTN is refused as well, for what it keeps elsewhere."""
OTHER_PLATFORMS = ("xpu", "hpu", "gcu", "metax", "iluvatar", "dcu", "maca")


@pytest.fixture(scope="module")
def worker_modules():
    return import_worker_modules()


@pytest.fixture(scope="module")
def cases(worker_modules):
    """What happens, by backend, quantization and phase. A backend of another platform calls Paddle itself."""
    classes = {name: each for name, each in backend_classes().items() if name != "BlockAttentionBackend"}
    seen = {
        (name, quant_type, phase): run_backend(name, backend_class, quant_type, phase)
        for name, backend_class in classes.items()
        for quant_type in quant_types(name)
        for phase in ("prefill", "decode")
    }
    if HAS_DSA:
        seen["Indexer", "uint8", "prefill"] = run_indexer(classes["DSAAttentionBackend"])
    return seen


def role_and_layer(tensor):
    kind, layer = re.fullmatch(r"(\w+)_(\d+)_rank0\.device0", tensor).groups()
    return kind.replace("_cache_scales", "_scale").replace("_caches", ""), int(layer)


def tensors_of(events):
    return {role_and_layer(tensor) for kind, *given in events for tensor in given[kind == "kernel" :]}


def test_a_layer_is_waited_for_before_it_is_read_and_no_other_is_read(cases):
    for case, (first, *others) in cases.items():
        name, quant_type, _ = case
        assert first == ["wait", LAYER], case
        expected = {(role, LAYER) for role in (SCALED if quant_type == "block_wise_fp8" else ROLES[name])}
        is_served = overlay.active().table.capabilities.flash_block_wise_fp8
        if not is_served and quant_type == "block_wise_fp8" and name.startswith("Flash"):
            assert tensors_of(others) != expected, "refused at start, so it must be wrong"
        else:
            assert tensors_of(others) == expected, case
    assert {name for name, _, _ in cases} == {name for name in ROLES if HAS_DSA or name not in OF_DSA}


def test_kernels_get_keys_before_values(cases):
    for case, events in cases.items():
        for name, *given in (event[1:] for event in events if event[0] == "kernel"):
            roles = [role_and_layer(tensor)[0] for tensor in given]
            assert roles == sorted(roles, key=["key", "value", "key_scale", "value_scale"].index), (case, name)


def test_the_prefill_of_latent_attention_reads_no_cached_prefix(cases):
    """Why MLA is mended, and DSA refused with prefix caching or chunks: if a release reads it, both can go."""
    for (name, _, phase), events in cases.items():
        kernels = {event[1] for event in events if event[0] == "kernel"}
        if phase == "prefill" and name in ("MLAAttentionBackend", "DSAAttentionBackend"):
            assert kernels in ({"prefill_mla_write_cache"}, {"dsk_attn_write_cache"}), name
        elif name == "MLAAttentionBackend":
            assert "multi_head_latent_attention" in kernels


def test_draft_layers_count_on_after_the_main_models(worker_modules):
    backend, (_, proposer) = backend_classes()["AppendAttentionBackend"], worker_modules
    first, *others = run_draft(proposer, backend, is_dummy=False)
    assert first == ["wait", MAIN_LAYERS]
    assert {layer for _, layer in tensors_of(others)} == {MAIN_LAYERS}
    assert "wait" not in {event[0] for event in run_draft(proposer, backend, is_dummy=True)}


def test_every_backend_for_a_gpu_is_driven_or_refused(cases):
    selectable = importlib.import_module("fastdeploy.platforms.base")._Backend.__members__
    cuda, offered = importlib.import_module("fastdeploy.platforms.cuda").CUDAPlatform, {}
    for name, member in selectable.items():
        try:
            offered[name] = cuda.get_attention_backend_cls(member).rpartition(".")[2]
        except ValueError:
            continue
    driven = {name for name, _, _ in cases}
    assert {name: backend for name, backend in offered.items() if backend not in driven} == REFUSED
    assert ("DSA_ATTN" in offered) == HAS_DSA


def cache_readers(path):
    """Functions in a file that index `.caches`, and those that call `attn_backend.forward`; of a class, by its name."""
    for owner, function in functions(ast.parse(path.read_text(encoding="utf-8")), ""):
        for node in ast.walk(function):
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("meta.caches"):
                yield "reads", path.stem, owner + function.name
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attn_backend.forward"):
                yield "calls", path.stem, owner + function.name


def functions(tree, owner):
    """With the class they are in, as `Name.`; of nested ones the outer one."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from functions(node, f"{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield owner, node
        else:
            yield from functions(node, owner)


def test_nothing_else_of_a_gpu_worker_reads_the_cache():
    """Attention backends, which only `Attention.forward` calls, and the indexer: both wait."""
    root = Path(fastdeploy.__file__).parent
    files = [path for folder in ("model_executor", "worker", "spec_decode") for path in (root / folder).rglob("*.py")]
    foreign = ("layers/backends/", *OTHER_PLATFORMS)
    own = [path for path in files if not any(name in path.relative_to(root).as_posix() for name in foreign)]
    found = {(what, stem, name) for path in own for what, stem, name in cache_readers(path)}
    backends = {entry for entry in found if entry[0] == "reads" and re.fullmatch(r"\w+_att\w+_backend", entry[1])}
    indexer = {("reads", "deepseek_v3", "Indexer.forward")} if HAS_DSA else set()
    assert found - backends == {("calls", "attention", "Attention.forward"), *indexer}
    assert len({stem for _, stem, _ in backends}) >= 6
