"""The tensors that every step makes anew: right, and gone afterwards."""

import gc

import numpy as np
import pytest

from fastdeploy_kvcache_v1.model import load_model_config
from fastdeploy_kvcache_v1.model.llama import Llama
from fastdeploy_kvcache_v1.model.step import SequenceSlice
from fastdeploy_kvcache_v1.model.tensors import as_array, step_tensor

from .model_dirs import BASE, random_tensors, write_model


@pytest.mark.parametrize("dtype", [np.int64, np.float32])
@pytest.mark.parametrize("values", [[], [3], [[1, 2], [3, 4]]])
def test_step_tensor_is_a_copy_of_its_values(values, dtype):
    array = np.array(values, dtype=dtype).T  # not contiguous
    tensor = step_tensor(array)
    expected = array.copy()
    array[...] = -1
    assert tensor.numpy().dtype == dtype
    np.testing.assert_array_equal(tensor.numpy(), expected)


def test_an_array_shares_the_memory_of_its_tensor_and_keeps_it():
    tensor = step_tensor(np.zeros((2, 3), dtype=np.float32))
    array = as_array(tensor)
    array[1, 2] = 5
    assert tensor.numpy().tolist() == [[0, 0, 0], [0, 0, 5]]
    tensor.fill_(7)
    del tensor
    gc.collect()
    others = [step_tensor(np.ones((2, 3), dtype=np.float32)) for _ in range(10)]
    assert array.tolist() == [[7] * 3] * 2, len(others)


def test_steps_leave_no_objects_behind(tmp_path):
    import paddle

    path = write_model(tmp_path, random_tensors(BASE), BASE)
    config = load_model_config(path)
    model = Llama.load(path, config)
    shape = [4, config.num_kv_heads, 16, config.head_dim]
    caches = [paddle.zeros(shape) for _ in range(2 * config.num_layers)]

    def steps(count):
        for position in range(count):
            slice_ = SequenceSlice(np.array([position], dtype=np.int64), position, [0, 1, 2, 3], True)
            model.forward([slice_], caches, lambda layer: None)
        gc.collect()
        return len(gc.get_objects())

    before = steps(10)
    assert steps(60) - before < 60, "something is kept per step"
