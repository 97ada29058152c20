"""A sealed block is what was sealed, under the key it was sealed for, and nothing else."""

import pytest

from fastdeploy_kvcache_v1.storage.seal import TRAILER_BYTES, is_sealed
from tests.storage.values import BLOCK_BYTES, DIGEST, VALUE_BYTES, keys, namespace, sealed


def test_a_block_is_sealed_for_its_own_key_only():
    key, other = keys(1, 2)
    buffer = sealed(key)
    assert is_sealed(buffer, key, namespace=DIGEST)
    assert not is_sealed(buffer, other, namespace=DIGEST)
    assert not is_sealed(sealed(other), key, namespace=DIGEST)


def test_a_block_is_sealed_for_its_own_namespace_only():
    (key,) = keys(1)
    other = namespace(model="n").digest
    assert not is_sealed(sealed(key), key, namespace=other)
    assert is_sealed(sealed(key, other), key, namespace=other)


@pytest.mark.parametrize("offset", [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 8, BLOCK_BYTES + 16])
def test_every_changed_byte_is_seen(offset):
    (key,) = keys(1)
    buffer = sealed(key)
    buffer[offset] ^= 1
    assert not is_sealed(buffer, key, namespace=DIGEST)


def test_a_block_that_never_arrived_is_not_sealed():
    (key,) = keys(1)
    assert not is_sealed(memoryview(bytearray(VALUE_BYTES)), key, namespace=DIGEST)


def test_a_trailer_of_another_length_is_not_sealed():
    (key,) = keys(1)
    longer = memoryview(bytearray(64) + bytearray(sealed(key)))
    assert not is_sealed(longer, key, namespace=DIGEST)
    assert TRAILER_BYTES % 64 == 0, "slots stay aligned to cache lines"
