"""Config, metadata and the batch message: what crosses process borders."""

from __future__ import annotations

import pytest

from fastdeploy_kvcache_v1.batch_request import BatchRequest
from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.errors import ConfigError, UnsupportedCopyError
from fastdeploy_kvcache_v1.metadata import (
    EVICT,
    NO_EVICT,
    NO_SWAP_IN,
    SWAP_IN,
    BlockHash,
    BlockNode,
    CacheLevel,
    CacheStatus,
    CacheSwapMetadata,
    SwapStep,
)

OUT = CacheSwapMetadata(*EVICT, (4, 5), (0, 1))
IN = CacheSwapMetadata(*SWAP_IN, (2,), (4,))
STORE = CacheSwapMetadata(CacheLevel.DEVICE, CacheLevel.STORAGE, (1,), (1,))


def test_a_step_runs_evictions_before_swap_ins_however_they_are_given() -> None:
    """Here the swap-in fills the device slot that the eviction reads."""
    step = SwapStep.of(1, IN, OUT)
    assert step.transfers == (OUT, IN)
    assert (step.evict, step.swap_in) == (OUT, IN)


def test_a_step_has_no_empty_copies() -> None:
    step = SwapStep.of(1, NO_EVICT, NO_SWAP_IN)
    assert not step
    assert step.transfers == ()
    assert (step.evict, step.swap_in) == (NO_EVICT, NO_SWAP_IN)


@pytest.mark.parametrize("transfers", [(IN, OUT), (OUT, OUT), (NO_EVICT,), (OUT, NO_SWAP_IN)])
def test_a_step_out_of_order_cannot_be_made(transfers: tuple[CacheSwapMetadata, ...]) -> None:
    with pytest.raises(ValueError, match="swap step 7 has copies that are empty, doubled or out of order"):
        SwapStep(7, transfers)


def test_a_copy_between_tiers_that_no_order_names_is_an_error_that_names_them() -> None:
    with pytest.raises(UnsupportedCopyError, match="from the device tier to the storage tier"):
        SwapStep.of(1, OUT, STORE)


def test_a_batch_without_copies_and_requests_is_empty() -> None:
    assert not BatchRequest()
    assert BatchRequest(["r"])
    assert BatchRequest(swap_steps=[SwapStep(1, (OUT,))])


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
        ({"write_policy": "write_sometimes"}, "unknown write policy 'write_sometimes': choose one of auto, "),
        ({"num_device_blocks": 1.5}, "must be an integer"),
        ({"num_host_blocks": True}, "must be an integer"),
    ],
)
def test_wrong_settings_say_what_to_do(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        KVCacheConfig(**{"num_device_blocks": 4, **options})  # type: ignore[arg-type]
    assert message in str(caught.value)
