"""Every attention backend of FastDeploy for a GPU waits for a layer before it reads it, and reads the tensors of that
layer. The code of the backends is real; kernels are FAKE.
"""

import ast
import json
import re

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for

from .fastdeploy_trees import HERE, RELEASES, has_dsa_attention, run_inside, tree

pytestmark = pytest.mark.process

LATENT = {"key"}
KEY_VALUE = {"key", "value"}
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


@pytest.fixture(scope="module", params=RELEASES)
def report(request, tmp_path_factory):
    release = request.param
    output = run_inside(release, tmp_path_factory.mktemp("fastdeploy"), HERE / "drive_attention.py")
    return release, output.splitlines()


def events_of(lines):
    """By backend, quantization and phase."""
    found = [json.loads(line.removeprefix("EVENTS ")) for line in lines if line.startswith("EVENTS ")]
    return {tuple(case): events for *case, events in found}


def expected_roles(case):
    name, quant_type, _ = case
    return SCALED if quant_type == "block_wise_fp8" else ROLES[name]


def role_and_layer(tensor):
    kind, layer = re.fullmatch(r"(\w+)_(\d+)_rank0\.device0", tensor).groups()
    return kind.replace("_cache_scales", "_scale").replace("_caches", ""), int(layer)


def test_a_layer_is_waited_for_before_it_is_read_and_no_other_is_read(report):
    release, lines = report
    cases = events_of(lines)
    no_flash_fp8 = not table_for(release).capabilities.flash_block_wise_fp8
    seen = set()
    for case, (first, *others) in cases.items():
        name, quant_type, _ = case
        if name == "MTPProposer":
            continue
        seen.add(name)
        assert first == ["wait", 1], case
        read = {role_and_layer(tensor) for kind, *given in others for tensor in given[kind == "kernel" :]}
        if no_flash_fp8 and quant_type == "block_wise_fp8" and name.startswith("Flash"):
            assert read != {(role, 1) for role in SCALED}, "refused at start, so it must be wrong"
        else:
            assert read == {(role, 1) for role in expected_roles(case)}, case
    assert seen == set(ROLES) - (set() if has_dsa_attention(release) else {"DSAAttentionBackend", "Indexer"})


def test_kernels_get_keys_before_values(report):
    _, lines = report
    for case, events in events_of(lines).items():
        for name, *given in (event[1:] for event in events if event[0] == "kernel"):
            roles = [role_and_layer(tensor)[0] for tensor in given]
            assert roles == sorted(roles, key=["key", "value", "key_scale", "value_scale"].index), (case, name)


def test_the_prefill_of_latent_attention_reads_no_cached_prefix(report):
    """Why MLA and DSA are refused with prefix caching or chunks: if a release reads it, the refusal can go."""
    _, lines = report
    for (name, _, phase), events in events_of(lines).items():
        kernels = {event[1] for event in events if event[0] == "kernel"}
        if phase == "prefill" and name in ("MLAAttentionBackend", "DSAAttentionBackend"):
            assert kernels in ({"prefill_mla_write_cache"}, {"dsk_attn_write_cache"}), name
        elif name == "MLAAttentionBackend":
            assert "multi_head_latent_attention" in kernels


def test_draft_layers_count_on_after_the_main_models(report):
    _, lines = report
    cases = events_of(lines)
    first, *others = cases["MTPProposer", None, "draft"]
    assert first == ["wait", 5]
    assert {role_and_layer(tensor)[1] for kind, *given in others for tensor in given[kind == "kernel" :]} == {5}
    assert "wait" not in {event[0] for event in cases["MTPProposer", None, "dummy"]}


def test_every_backend_for_a_gpu_is_driven_or_refused(report):
    release, lines = report
    offered = {line.split()[1]: line.split()[2] for line in lines if line.startswith("SELECTABLE")}
    offered = {name: backend for name, backend in offered.items() if backend != "refused"}
    driven = {case[0] for case in events_of(lines)}
    assert {name: backend for name, backend in offered.items() if backend not in driven} == REFUSED
    assert ("DSA_ATTN" in offered) == has_dsa_attention(release)


def cache_readers(path):
    """Functions in a file that index `.caches`, and those that call `attn_backend.forward`."""
    for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if isinstance(node, ast.Subscript) and ast.unparse(node.value).endswith("meta.caches"):
                    yield "reads", path.stem, function.name
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("attn_backend.forward"):
                    yield "calls", path.stem, function.name


@pytest.mark.parametrize("release", RELEASES)
def test_nothing_else_of_a_gpu_worker_reads_the_cache(release):
    """Attention backends, which only `Attention.forward` calls, and the indexer: both wait."""
    root = tree(release) / "fastdeploy"
    files = [path for folder in ("model_executor", "worker", "spec_decode") for path in (root / folder).rglob("*.py")]
    foreign = ("layers/backends/", *OTHER_PLATFORMS)
    own = [path for path in files if not any(name in path.relative_to(root).as_posix() for name in foreign)]
    found = {(what, stem, name) for path in own for what, stem, name in cache_readers(path)}
    backends = {entry for entry in found if entry[0] == "reads" and re.fullmatch(r"\w+_att\w+_backend", entry[1])}
    indexer = {("reads", "deepseek_v3", "forward")} if has_dsa_attention(release) else set()
    assert found - backends == {("calls", "attention", "forward"), *indexer}
    assert len({stem for _, stem, _ in backends}) >= 6
