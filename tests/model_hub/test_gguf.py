"""The GGUF reader against files written here, and each quantization against its definition, element by element."""

import struct

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import ModelError
from fastdeploy_kvcache_v1.model_hub.gguf import GGUF

from .gguf_file import gguf_bytes


def test_metadata_of_every_kind():
    metadata = {"a": True, "b": 7, "c": 0.5, "d": "père", "e": [1, 2, 3], "f": ["x", "", "yz"]}
    assert GGUF(gguf_bytes(metadata, {})).metadata == metadata


@pytest.mark.parametrize("alignment", [None, 64])
def test_tensors_lie_at_aligned_offsets_in_the_order_of_their_shape(alignment):
    first, second = np.arange(6, dtype="<f4").reshape(2, 3), np.arange(5, dtype="<f4") + 100
    metadata = {} if alignment is None else {"general.alignment": alignment}
    gguf = GGUF(gguf_bytes(metadata, {"one": ((2, 3), 0, first.tobytes()), "two": ((5,), 0, second.tobytes())}))
    assert ("one" in gguf, "three" in gguf, gguf.shape("one")) == (True, False, (2, 3))
    np.testing.assert_array_equal(gguf.read("one"), first)
    np.testing.assert_array_equal(gguf.read("two"), second)


def half(value):
    return float(np.float16(value))


def test_q4_1_is_scale_times_step_plus_least_with_the_second_half_in_the_high_bits():
    random = np.random.default_rng(1)
    blocks, expected = b"", []
    for scale, least in ((0.03, -0.7), (1.5, 2.0)):
        steps = random.integers(0, 16, 32)
        pairs = [int(steps[index] | steps[index + 16] << 4) for index in range(16)]
        blocks += struct.pack("<ee16B", scale, least, *pairs)
        expected += [np.float32(np.float32(half(scale) * int(step)) + np.float32(half(least))) for step in steps]
    read = GGUF(gguf_bytes({}, {"t": ((2, 32), 3, blocks)})).read("t")
    assert read.dtype == np.float32
    np.testing.assert_array_equal(read, np.array(expected, np.float32).reshape(2, 32))


def test_q8_0_is_scale_times_a_signed_byte():
    values = np.random.default_rng(2).integers(-128, 128, (2, 32))
    blocks = b"".join(struct.pack("<e32b", scale, *map(int, row)) for scale, row in zip((0.1, 3), values, strict=True))
    read = GGUF(gguf_bytes({}, {"t": ((64,), 8, blocks)})).read("t")
    expected = values * np.array([[half(0.1)], [3.0]])
    np.testing.assert_array_equal(read, expected.astype(np.float32).reshape(64))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04" + bytes(60), "not GGUF version 3"),
        (gguf_bytes({}, {}, version=2), "not GGUF version 3"),
        (gguf_bytes({}, {"odd": ((32,), 14, bytes(99))}), "tensor odd of a GGUF file: its type 14 is not supported"),
    ],
)
def test_other_formats_are_refused(content, message):
    with pytest.raises(ModelError, match=message):
        GGUF(content)
