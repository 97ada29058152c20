"""Shared by the tests of the worker side: tasks with copies, and tensors and what is in them."""

import numpy as np

from fastdeploy_kvcache_v1.attention.layouts import GQACacheBackend
from fastdeploy_kvcache_v1.contract.messages import BlockCopies, CacheLevel
from fastdeploy_kvcache_v1.contract.swap_message import START, encode
from fastdeploy_kvcache_v1.fastdeploy_integration.transport import SWAP_ATTRIBUTE
from fastdeploy_kvcache_v1.fastdeploy_integration.worker.worker_cache import MAIN
from tests.fastdeploy_integration.engine.by_hand import FakeTask


def swap_out(*pairs):
    return BlockCopies(CacheLevel.DEVICE, CacheLevel.HOST, *map(tuple, zip(*pairs, strict=True)))


def swap_in(*pairs):
    return BlockCopies(CacheLevel.HOST, CacheLevel.DEVICE, *map(tuple, zip(*pairs, strict=True)))


def task(step=None, previous=START, table=(0,)):
    made = FakeTask("r", [1])
    made.idx, made.block_tables = 0, list(table)
    made.prefill_end_index = 2 * len(made.block_tables)
    if step is not None:
        setattr(made, SWAP_ATTRIBUTE, encode(step, previous))
    return made


def register(cache, part=MAIN, layers=2, blocks=6, first_layer=0, heads=1):
    backend = GQACacheBackend(layers, heads, 3, 2, "float32")
    tensors = backend.create_kv_cache(blocks, first_layer=first_layer)
    cache.register(part, backend.layout, tensors, blocks)
    return tensors


def fill(tensors, slot, value):
    for number, tensor in enumerate(tensors.values()):
        tensor[slot] = value + number


def content(tensors, slot):
    return [float(np.unique(tensor[slot].numpy()).item()) for tensor in tensors.values()]
