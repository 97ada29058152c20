"""The SDK behind an interface of our own. It is private: nothing of it is imported before the backend was chosen."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ...attention.base import CacheLayout
from ...errors import ConfigError, StorageError
from ..namespace import Namespace
from .tasks import MATCH_TIMEOUT_S, ReadStorageTask, WriteStorageTask

__all__ = ["DeviceCaches", "SdkConnection", "SdkIdentity", "load_sdk", "require_installed", "require_layout"]

logger = logging.getLogger(__name__)

PACKAGE = "attentionstore_sdk"

READY_TIMEOUT_S = 300.0
READY_RETRY_S = 5.0
NOT_READY = "cuda memory not ready"
"""In the text of the SDK's error while it still starts."""


class _Rows(Protocol):
    @property
    def address(self) -> int:
        """Of the first block."""


@dataclass(frozen=True)
class DeviceCaches:
    """The device tier of one rank, as the SDK addresses it."""

    key_pointers: tuple[int, ...]
    """Address of each layer's key tensor, `[num_blocks, ...]`: blocks one behind the other."""
    value_pointers: tuple[int, ...]
    """Likewise."""
    late_writes: Callable[[Sequence[int]], Sequence[Any]] = lambda slots: ()
    """What still writes to one of these slots (`runtime.Event`) without the engine's knowledge. Any thread calls it."""
    refilled: Callable[[Sequence[int]], None] = lambda slots: None
    """Told which slots have been filled, before the engine is. Any thread calls it."""
    owner: object = None
    """Keeps the memory: as long as it is referred to, the addresses stay valid."""

    @classmethod
    def over(cls, layers: Sequence[Sequence[_Rows]], **callbacks: Any) -> DeviceCaches:
        """Key and value of each layer are its first two tensors. Where there is no value, no block is moved either."""
        return cls(
            key_pointers=tuple(layer[0].address for layer in layers),
            value_pointers=tuple(layer[min(1, len(layer) - 1)].address for layer in layers),
            **callbacks,
        )


@dataclass(frozen=True)
class SdkIdentity:
    """What the SDK tells this rank's shard of a model by."""

    namespace: str
    pod_name: str
    model_version: str
    shard_id: int
    shard_num: int
    layer_num: int
    block_token_size: int
    bytes_per_shard_layer_per_block: int
    """Of the key; the value has as many."""
    device_id: int = 0
    dp_id: int = 0

    @classmethod
    def of(
        cls,
        namespace: Namespace,
        rank: int,
        *,
        device_id: int = 0,
        dp_id: int = 0,
        splitwise_role: str = "mixed",
        default_namespace: str = "default_ns",
    ) -> SdkIdentity:
        """With FastDeploy's environment variables and defaults. The model version ends with the digest of `namespace`:
        the SDK knows blocks by their tokens only, and two models, dtypes, layouts or weight epochs must not meet.
        """
        pod_name = os.environ.get("AS_POD_NAME", "default_pod")
        if os.environ.get("ENABLE_EP_DP_IN_FD", "1") not in ("", "0"):
            pod_name = f"{pod_name}_{splitwise_role}_{dp_id}"
        return cls(
            namespace=os.environ.get("AS_NAMESPACE", default_namespace),
            pod_name=pod_name,
            model_version=f"{os.environ.get('AS_MODEL_VERSION', 'v0')}-{namespace.digest}",
            shard_id=rank,
            shard_num=namespace.tensor_parallel_size,
            layer_num=namespace.layout.num_layers,
            block_token_size=namespace.block_size,
            bytes_per_shard_layer_per_block=namespace.layout.roles[0].block_bytes,
            device_id=device_id,
            dp_id=dp_id,
        )


@dataclass(frozen=True)
class SdkModules:
    """What we use of the SDK."""

    client: Any
    """`AttentionStoreSDK`."""
    tokens: Any
    """`Tokens`."""
    error: type[Exception]
    """`AttentionStoreSDKError`."""

    @property
    def describes_attention(self) -> bool:
        """On a GPU it takes the bytes of key and value one by one, and more arguments: FastDeploy 2.6 calls it so.
        FastDeploy 2.5 calls an older one, which takes the same arguments on every device.
        """
        try:
            return "attention_type" in inspect.signature(self.client).parameters
        except (TypeError, ValueError):  # compiled, without a signature
            return importlib.util.find_spec(f"{PACKAGE}.client") is not None


def require_installed() -> None:
    """Raises `ConfigError`. Imports nothing."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise ConfigError(
            f"the storage backend attention_store needs the package {PACKAGE}, which is not installed: "
            "get it from its vendor, or choose another --kvcache-storage-backend"
        )


def require_layout(layout: CacheLayout) -> None:
    """Raises `ConfigError` for a cache that the SDK's interface cannot describe."""
    roles = {role.role: role.block_bytes for role in layout.roles}
    if roles.keys() != {"key", "value"} or roles["key"] != roles["value"]:
        shown = ", ".join(f"{role} of {num_bytes} bytes" for role, num_bytes in roles.items())
        raise ConfigError(
            "the storage backend attention_store moves blocks of a key and a value of the same size, the model's cache "
            f"has {shown}: choose another --kvcache-storage-backend"
        )


def load_sdk() -> SdkModules:
    """Raises `ConfigError` when the SDK is not there, or cannot be imported."""
    require_installed()
    try:
        sdk = importlib.import_module(f"{PACKAGE}.sdk")
        errors = importlib.import_module(f"{PACKAGE}.utils.err")
        return SdkModules(sdk.AttentionStoreSDK, sdk.Tokens, errors.AttentionStoreSDKError)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the package {PACKAGE} cannot be used: {error}") from error


class SdkConnection:
    """One instance of the SDK. Thread-safe as far as the SDK is: FastDeploy, too, reads and writes on several threads.

    Every call raises `StorageError` when the SDK fails, or answers what cannot be. The SDK has no call that closes it.
    """

    def __init__(
        self,
        modules: SdkModules,
        identity: SdkIdentity,
        *,
        on_gpu: bool = False,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """Returns when the SDK can be used, which may take minutes. Raises `StorageError` when it cannot."""
        self.identity = identity
        self.block_bytes = 2 * identity.layer_num * identity.bytes_per_shard_layer_per_block
        """Of one block on this rank."""
        self._modules = modules
        self._has_options = on_gpu and modules.describes_attention
        self._layers = list(range(identity.layer_num))
        try:
            self._sdk = self._make()
            self._wait_until_ready(sleep)
        except StorageError:
            raise
        except Exception as error:  # the edge to a foreign library
            text = error if isinstance(error, modules.error) else repr(error)
            raise StorageError(f"the attention store cannot be used: {text}") from error

    def match(self, token_ids: Sequence[int], timeout: float = MATCH_TIMEOUT_S) -> int:
        """How many blocks of the path are stored, from the root on."""
        # From block 0 on, whatever the caller wants to know: what the SDK counts from elsewhere on is not documented.
        most = len(token_ids) // self.identity.block_token_size
        return self._count("match", most, lambda: self._sdk.match(self._tokens(token_ids), 0, timeout))

    def read(self, task: ReadStorageTask, caches: DeviceCaches) -> int:
        """How many of the device blocks of `task` were filled, from the first one on."""
        extra: dict[str, Any] = {"remote_addrs": None} if self._has_options else {}
        return self._count(
            "read",
            len(task.gpu_block_ids),
            lambda: self._sdk.read(
                self._layers,
                self._tokens(task.token_ids),
                task.start_read_block_idx,
                list(caches.key_pointers),
                list(caches.value_pointers),
                list(task.gpu_block_ids),
                task.timeout,
                **extra,
            ),
        )

    def write(
        self, token_ids: Sequence[int], first: int, blocks: Sequence[int], timeout: float, caches: DeviceCaches
    ) -> int:
        """Store device `blocks`, which are those of the path from `first` on; returns how many were."""
        extra: dict[str, Any] = {"h2h_copy": False, "params": None} if self._has_options else {}
        return self._count(
            "write",
            len(blocks),
            lambda: self._sdk.write(
                self._layers,
                self._tokens(token_ids),
                first,
                list(caches.key_pointers),
                list(caches.value_pointers),
                list(blocks),
                timeout,
                **extra,
            ),
        )

    def flush(self, task: WriteStorageTask) -> None:
        """Tell the index whether this server has the blocks of the path from `start_write_block_idx` on."""
        here = importlib.import_module(f"{PACKAGE}.api.common.common_pb2").MEDIA_HBM
        before, now = (None, here) if task.flush_cache_exists else (here, None)
        try:
            self._sdk.flush_token_index(
                self._layers, self._tokens(task.token_ids), task.start_write_block_idx, before, now
            )
        except self._modules.error as error:
            raise StorageError(f"the attention store could not flush: {error}") from error

    def _make(self) -> Any:
        who = self.identity
        sizes, extra = [who.bytes_per_shard_layer_per_block], {}
        if self._has_options:
            attention = importlib.import_module(f"{PACKAGE}.client.client").AttentionType.MHA
            sizes, extra = sizes * 2, {"attention_type": attention, "enable_as_kv_rw": True, "gpu_count": 0}
        return self._modules.client(
            who.namespace,
            who.pod_name,
            who.model_version,
            who.shard_id,
            who.shard_num,
            who.layer_num,
            who.block_token_size,
            *sizes,
            who.device_id,
            who.dp_id,
            **extra,
        )

    def _wait_until_ready(self, sleep: Callable[[float], None]) -> None:
        tokens = self._tokens(range(self.identity.block_token_size + 1))
        for _ in range(int(READY_TIMEOUT_S / READY_RETRY_S)):
            try:
                self._sdk.match(tokens, 0, READY_RETRY_S)
                return
            except self._modules.error as error:
                if NOT_READY not in str(error):
                    raise
                logger.info("the attention store is not ready: %s", error)
            sleep(READY_RETRY_S)
        raise StorageError(f"the attention store cannot be used: it was not ready within {READY_TIMEOUT_S:.0f} s")

    def _tokens(self, token_ids: Sequence[int]) -> Any:
        return self._modules.tokens(list(token_ids), self.identity.block_token_size)

    def _count(self, what: str, most: int, call: Callable[[], Any]) -> int:
        try:
            number = call()
        except self._modules.error as error:
            raise StorageError(f"the attention store could not {what}: {error}") from error
        if not isinstance(number, int) or not 0 <= number <= most:
            raise StorageError(f"the attention store answered {number!r} to a {what} of {most} blocks")
        return number
