"""Config, metadata and the batch message: what crosses process borders."""

from __future__ import annotations

import pickle
import random
from types import SimpleNamespace

import pytest

from fastdeploy_kvcache_v1.batch_request import BatchRequest, attach_swap_steps, detach_swap_steps
from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.metadata import BlockHash, BlockNode, CacheLevel, CacheStatus, CacheSwapMetadata, SwapStep
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import GivenHashes


def step(number: int, *targets: int) -> SwapStep:
    swap_in = CacheSwapMetadata(CacheLevel.HOST, CacheLevel.DEVICE, tuple(range(len(targets))), targets)
    return SwapStep(number, swap_in=swap_in)


def is_control(task: SimpleNamespace) -> bool:
    return bool(task.control)


def tasks(*names: str) -> list[SimpleNamespace]:
    return [SimpleNamespace(name=name, control=name.startswith("control")) for name in names]


def test_from_tasks_sorts_and_collects_the_swap_steps_in_order() -> None:
    batch = tasks("r1", "control", "r2", "r3")
    attach_swap_steps(batch[0], [step(4, 1)])
    attach_swap_steps(batch[3], [step(3, 2), step(5)])
    random.Random(0).shuffle(batch)
    request = BatchRequest.from_tasks(batch, is_control=is_control)
    assert {task.name for task in request.requests} == {"r1", "r2", "r3"}
    assert [task.name for task in request.controls] == ["control"]
    assert [swap.step for swap in request.swap_steps] == [3, 4]  # the empty step 5 carries nothing
    assert all(detach_swap_steps(task) == () for task in batch), "no step is handed over twice"


def test_extend_and_append_keep_every_step_once() -> None:
    one = BatchRequest([1], [], [step(2, 1)])
    one.extend(BatchRequest([2], ["c"], [step(1, 7)]))
    one.append(3)
    assert (one.requests, one.controls) == ([1, 2, 3], ["c"])
    assert [swap.step for swap in one.swap_steps] == [1, 2]
    with pytest.raises(ValueError, match="step 2 was handed over twice"):
        one.extend(BatchRequest([4], [], [step(2, 5)]))
    assert len(one) == 3
    assert not BatchRequest()


def test_the_batch_pickles_without_the_tree() -> None:
    cache = CacheManager(KVCacheConfig(1000, 1000, block_size=1, write_policy=WritePolicy.WRITE_THROUGH))
    cache.match_prefix("r", GivenHashes([BlockHash(b"%032d" % number) for number in range(900)], 901))
    cache.allocate("r", 900)
    cache.take_swap_step()
    cache.commit("r", 900)
    swap = cache.take_swap_step()
    assert len(swap.evict) == 900
    batch = BatchRequest(["r"], [], [swap])
    data = pickle.dumps(batch)
    assert pickle.loads(data) == batch
    assert len(data) < 900 * 2 * 4 + 1000
    assert b"RadixTree" not in data
    assert b"Run" not in data


def test_status_is_derived() -> None:
    def status(
        device: int | None, host: int | None, transfer: CacheLevel | None = None, detached: bool = False
    ) -> CacheStatus:
        return BlockNode(BlockHash(b""), device, host, transfer, detached).status  # type: ignore[arg-type]

    assert status(1, None) is CacheStatus.DEVICE
    assert status(1, 1) is CacheStatus.DEVICE
    assert status(None, 1) is CacheStatus.HOST
    assert status(1, 1, CacheLevel.HOST) is CacheStatus.SWAP_TO_HOST
    assert status(None, 1, CacheLevel.HOST) is CacheStatus.SWAP_TO_HOST
    assert status(1, 1, CacheLevel.DEVICE) is CacheStatus.SWAP_TO_DEVICE
    assert status(1, None, CacheLevel.DEVICE) is CacheStatus.LOADING_FROM_STORAGE
    assert status(1, 1, None, True) is CacheStatus.DELETING


def test_swap_metadata_needs_a_target_per_source() -> None:
    with pytest.raises(ValueError, match="one target per source"):
        CacheSwapMetadata(CacheLevel.HOST, CacheLevel.DEVICE, (1,), ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_device_blocks": 0}, "num_device_blocks must be at least 1, got 0"),
        ({"num_host_blocks": -1}, "num_host_blocks must be at least 0"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"write_through_threshold": 0}, "write_through_threshold must be at least 1"),
        ({"write_policy": "write_sometimes"}, "unknown write policy 'write_sometimes': choose one of write_through, "),
        ({"num_device_blocks": 1.5}, "must be an integer"),
        ({"num_host_blocks": True}, "must be an integer"),
    ],
)
def test_wrong_settings_say_what_to_do(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        KVCacheConfig(**{"num_device_blocks": 4, **options})  # type: ignore[arg-type]
    assert message in str(caught.value)
