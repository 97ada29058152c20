"""How the SDK is found, made, waited for and called."""

import sys
from dataclasses import replace

import pytest

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.errors import ConfigError, StorageError
from fastdeploy_kvcache_v1.storage.attention_store.sdk import (
    READY_RETRY_S,
    READY_TIMEOUT_S,
    SdkConnection,
    SdkIdentity,
    load_sdk,
    require_installed,
    require_layout,
)
from fastdeploy_kvcache_v1.storage.attention_store.tasks import ReadStorageTask
from tests.storage.attention_store.memory import BLOCK_SIZE, LAYOUT, Memory, space, tokens
from tests.storage.attention_store.stand_in import num_stored, set_faults

KEY_BYTES = LAYOUT.roles[0].block_bytes


def connect(*, rank=0, on_gpu=False, sleep=lambda seconds: None, **changes):
    identity = SdkIdentity.of(space(**changes), rank)
    return SdkConnection(load_sdk(), identity, on_gpu=on_gpu, sleep=sleep)


def made():
    return sys.modules["attentionstore_sdk.sdk"].MADE


def options():
    return sys.modules["attentionstore_sdk.sdk"].OPTIONS


def test_without_the_package_the_error_names_it():
    for call in (require_installed, load_sdk):
        with pytest.raises(ConfigError, match="needs the package attentionstore_sdk, which is not installed"):
            call()


def test_a_package_that_lacks_what_we_use_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "attentionstore_sdk").mkdir()
    (tmp_path / "attentionstore_sdk" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match="attentionstore_sdk cannot be used: No module named"):
        load_sdk()
    del sys.modules["attentionstore_sdk"]


def layout(*roles):
    return CacheLayout(1, tuple(RoleSpec(role, (1, size), "uint8") for role, size in roles))


@pytest.mark.parametrize(
    "roles",
    [
        [("key", 8)],
        [("key", 8), ("value", 4)],
        [("key", 8), ("value", 8), ("key_scale", 1), ("value_scale", 1)],
        [("key", 8), ("value", 8), ("indexer", 2)],
    ],
)
def test_a_cache_that_the_interface_cannot_describe_is_refused(roles):
    with pytest.raises(ConfigError, match=f"the model's cache has {roles[0][0]} of 8 bytes"):
        require_layout(layout(*roles))
    require_layout(layout(("key", 8), ("value", 8)))


def test_identity_has_fastdeploys_defaults_and_the_namespace_digest(sdk_store, monkeypatch):
    for name in ("AS_NAMESPACE", "AS_POD_NAME", "AS_MODEL_VERSION", "ENABLE_EP_DP_IN_FD"):
        monkeypatch.delenv(name, raising=False)
    connect()
    version = f"v0-{space().digest}"
    assert made() == [("default_ns", "default_pod_mixed_0", version, 0, 1, 2, BLOCK_SIZE, KEY_BYTES, 0, 0, {})]
    monkeypatch.setenv("AS_NAMESPACE", "ours")
    monkeypatch.setenv("AS_POD_NAME", "pod")
    monkeypatch.setenv("AS_MODEL_VERSION", "v7")
    monkeypatch.setenv("ENABLE_EP_DP_IN_FD", "0")
    connect(rank=1, tensor_parallel_size=2, weight_epoch="3")
    version = f"v7-{space(tensor_parallel_size=2, weight_epoch='3').digest}"
    assert made()[1] == ("ours", "pod", version, 1, 2, 2, BLOCK_SIZE, KEY_BYTES, 0, 0, {})


def test_sdk_gets_bytes_of_key_and_value_and_the_attention_on_a_gpu(sdk_store):
    connect(on_gpu=True)
    *identity, key, value, device, data_parallel, options = made()[0]
    assert identity[3:] == [0, 1, 2, BLOCK_SIZE]
    assert (key, value, device, data_parallel) == (KEY_BYTES, KEY_BYTES, 0, 0)
    assert options.pop("attention_type").name == "MHA"
    assert options == {"enable_as_kv_rw": True, "gpu_count": 0}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_an_older_sdk_gets_the_same_arguments_on_every_device(sdk_store, on_gpu):
    """FastDeploy 2.5 knows no other."""
    older = load_sdk().client.__init__

    class Older(load_sdk().client):
        def __init__(self, a, b, c, d, e, f, g, size, device, data_parallel):
            older(self, a, b, c, d, e, f, g, size, device, data_parallel)

    modules = replace(load_sdk(), client=Older)
    memory = Memory()
    memory.fill(3, 8)
    sdk = SdkConnection(modules, SdkIdentity.of(space(), 0), on_gpu=on_gpu)
    assert sdk.write(tokens(1), 0, (3,), 1.0, memory.caches()) == 1
    assert options() == [{}]


def test_an_sdk_of_another_form_is_refused_in_one_line(sdk_store):
    modules = replace(load_sdk(), client=lambda namespace: None)
    with pytest.raises(StorageError, match=r"the attention store cannot be used: TypeError\("):
        SdkConnection(modules, SdkIdentity.of(space(), 0))


@pytest.mark.parametrize("on_gpu", [False, True])
def test_what_is_written_is_read(sdk_store, on_gpu):
    memory = Memory()
    sdk = connect(on_gpu=on_gpu)
    memory.fill(0, 7)
    memory.fill(3, 8)
    path = tokens(1, 2)
    assert sdk.match(path) == 0
    assert sdk.write(path, 0, (0, 3), 1.0, memory.caches()) == 2
    assert sdk.match(path) == 2
    task = ReadStorageTask(task_id="r", token_ids=path, gpu_block_ids=(5,), start_read_block_idx=1)
    assert sdk.read(task, memory.caches()) == 1
    assert memory.holds(5, 8)
    assert num_stored(sdk_store) == 2
    assert options() == ([{"h2h_copy": False, "params": None}, {"remote_addrs": None}] if on_gpu else [{}, {}])
    assert sdk.block_bytes == LAYOUT.block_bytes


@pytest.mark.parametrize("answer", [3, -1, None, "2"])
def test_an_answer_that_cannot_be_is_an_error(sdk_store, answer):
    sdk = connect()
    set_faults(sdk_store, match={"answer": answer}, write={"answer": answer}, read={"answer": answer})
    task = ReadStorageTask(task_id="r", token_ids=tokens(1, 2), gpu_block_ids=(5, 6), start_read_block_idx=0)
    for what, call in (
        ("match", lambda: sdk.match(tokens(1, 2))),
        ("read", lambda: sdk.read(task, Memory().caches())),
        ("write", lambda: sdk.write(tokens(1, 2), 0, (1, 2), 1.0, Memory().caches())),
    ):
        with pytest.raises(StorageError, match=f"answered {answer!r} to a {what} of 2 blocks"):
            call()


def test_the_start_waits_until_the_sdk_is_ready(sdk_store):
    set_faults(sdk_store, match={"error": "device 0: cuda memory not ready", "times": 3})
    slept = []
    connect(sleep=slept.append)
    assert slept == [READY_RETRY_S] * 3


def test_a_start_that_takes_too_long_or_fails_is_an_error(sdk_store):
    slept = []
    set_faults(sdk_store, match={"error": "cuda memory not ready"})
    with pytest.raises(StorageError, match="was not ready within 300 s"):
        connect(sleep=slept.append)
    assert sum(slept) == READY_TIMEOUT_S
    set_faults(sdk_store, match={"error": "licence expired"})
    with pytest.raises(StorageError, match="cannot be used: licence expired"):
        connect()
