import numpy as np
import paddle
import pytest

from fastdeploy_kvcache_v1.model.paged_cache import PagedCache


def nan_cache(dtype):
    """3 blocks of 4 slots, 2 heads of 6."""
    return paddle.full([3, 2, 4, 6], float("nan"), dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_rows_are_slots_of_one_head(dtype):
    cache = nan_cache(dtype)
    address = cache.data_ptr()
    values = np.arange(12, dtype=np.float32).reshape(2, 6)
    paged = PagedCache(cache)

    # Block 2, head 1, slot 3; block 0, head 1, slot 0.
    paged.write(paddle.to_tensor([23, 4]), paddle.to_tensor(values))

    stored = cache.astype("float32").numpy()
    assert np.array_equal(stored[2, 1, 3], values[0])
    assert np.array_equal(stored[0, 1, 0], values[1])
    assert np.isnan(stored).sum() == stored.size - 12
    assert cache.data_ptr() == address
    assert np.array_equal(paged.read(paddle.to_tensor([4, 23])).numpy(), values[::-1])


def test_float16_saturates():
    """An infinite value would reach other tokens through 0 * inf."""
    cache = nan_cache("float16")
    values = np.full((2, 6), 1e6, dtype=np.float32) * np.array([[1], [-1]], dtype=np.float32)
    PagedCache(cache).write(paddle.to_tensor([0, 1]), paddle.to_tensor(values))
    stored = cache.astype("float32").numpy()
    assert stored[0, 0, 0].tolist() == [65504.0] * 6
    assert stored[0, 0, 1].tolist() == [-65504.0] * 6
