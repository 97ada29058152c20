"""Device tiers of NumPy arrays, and the namespace that they belong to."""

import numpy as np

from fastdeploy_kvcache_v1.attention.base import CacheLayout, RoleSpec
from fastdeploy_kvcache_v1.storage.attention_store.sdk import DeviceCaches
from tests.storage.values import namespace

LAYERS = 2
BLOCK_SIZE = 4
SHAPE = (2, BLOCK_SIZE, 8)
NUM_BLOCKS = 8
LAYOUT = CacheLayout(LAYERS, (RoleSpec("key", SHAPE, "float32"), RoleSpec("value", SHAPE, "float32")))


def space(**changes):
    return namespace(layout=LAYOUT, block_size=BLOCK_SIZE, **changes)


def tokens(*blocks):
    """A path; a block is named by a number."""
    return tuple(100 * block + offset for block in blocks for offset in range(BLOCK_SIZE))


class Memory:
    """Of one rank. A block's content follows from the rank, the layer, the role and a number."""

    def __init__(self, rank=0):
        self.rank = rank
        self.tensors = [np.zeros((NUM_BLOCKS, *SHAPE), np.float32) for _ in range(2 * LAYERS)]
        self.late = []
        self.refilled = []

    def caches(self):
        addresses = [tensor.ctypes.data for tensor in self.tensors]
        return DeviceCaches(
            tuple(addresses[:LAYERS]),
            tuple(addresses[LAYERS:]),
            lambda slots: self.late,
            self.refilled.append,
            self.tensors,
        )

    def fill(self, slot, number):
        for index, tensor in enumerate(self.tensors):
            tensor[slot] = self._value(index, number)

    def holds(self, slot, number):
        return all((tensor[slot] == self._value(index, number)).all() for index, tensor in enumerate(self.tensors))

    def _value(self, index, number):
        return 1000 * self.rank + 100 * index + number
