"""Tries the attention store out: stores blocks as the embedded server does, reads them back and compares them."""

from __future__ import annotations

import os
import time

import numpy as np

from ...attention.base import CacheLayout, RoleSpec
from ...errors import KVCacheError, StorageError
from ..registry import RoundTrip
from ..round_trip import NUM_BYTES, trial_namespace
from .sdk import DeviceCaches, SdkConnection, SdkIdentity, load_sdk
from .tasks import TRANSFER_TIMEOUT_S, ReadStorageTask

__all__ = ["try_attention_store"]

NUM_BLOCKS = 32
BLOCK_TOKENS = 64
ROLE_BYTES = NUM_BYTES // NUM_BLOCKS // 2

_in_use: list[Memory] = []
"""Of calls that failed: the SDK may still move bytes there."""


class Memory:
    """A device tier of one layer: blocks that are stored, and as many that are filled again."""

    def __init__(self) -> None:
        shape = (2 * NUM_BLOCKS, ROLE_BYTES)
        self.roles = [np.zeros(shape, np.uint8) for _ in range(2)]
        for role in self.roles:
            role[:NUM_BLOCKS] = np.frombuffer(os.urandom(NUM_BLOCKS * ROLE_BYTES), np.uint8).reshape(NUM_BLOCKS, -1)

    @property
    def caches(self) -> DeviceCaches:
        key, value = (role.ctypes.data for role in self.roles)
        return DeviceCaches((key,), (value,))

    def num_whole(self) -> int:
        """Blocks that came back as they were stored."""
        same = [(role[:NUM_BLOCKS] == role[NUM_BLOCKS:]).all(axis=1) for role in self.roles]
        return int((same[0] & same[1]).sum())


def try_attention_store() -> RoundTrip:
    """In a namespace of its own. What was stored stays there until the store evicts it: the SDK removes nothing.

    Waits for the SDK as a server does, up to five minutes. Raises `ConfigError` if it is not installed, `StorageError`
    if it does not work.
    """
    sdk = load_sdk()
    layout = CacheLayout(1, (RoleSpec("key", (ROLE_BYTES,), "uint8"), RoleSpec("value", (ROLE_BYTES,), "uint8")))
    identity = SdkIdentity.of(trial_namespace(layout, block_size=BLOCK_TOKENS), 0)
    memory = Memory()
    try:
        return _round_trip(SdkConnection(sdk, identity), memory)
    except Exception as error:  # the edge to a foreign library
        _in_use.append(memory)
        if isinstance(error, KVCacheError):
            raise
        raise StorageError(f"the attention store failed: {error!r}") from error


def _round_trip(sdk: SdkConnection, memory: Memory) -> RoundTrip:
    token_ids = tuple(range(NUM_BLOCKS * BLOCK_TOKENS))
    begin = time.perf_counter()
    written = sdk.write(token_ids, 0, range(NUM_BLOCKS), TRANSFER_TIMEOUT_S, memory.caches)
    put_s = time.perf_counter() - begin
    if (stored := min(written, sdk.match(token_ids))) != NUM_BLOCKS:
        raise StorageError(f"of {NUM_BLOCKS} blocks expected in the store, only the first {stored} are there")
    filled = tuple(range(NUM_BLOCKS, 2 * NUM_BLOCKS))
    task = ReadStorageTask(task_id="trial", token_ids=token_ids, gpu_block_ids=filled, start_read_block_idx=0)
    begin = time.perf_counter()
    arrived = sdk.read(task, memory.caches)
    get_s = time.perf_counter() - begin
    if (arrived, whole := memory.num_whole()) != (NUM_BLOCKS, NUM_BLOCKS):
        raise StorageError(f"of {NUM_BLOCKS} blocks that were stored, {arrived} came back, and {whole} unchanged")
    return RoundTrip(put_s, get_s, NUM_BYTES)
