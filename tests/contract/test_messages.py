"""Config, metadata and messages: what crosses process borders. A step is plain data, in a chain, with a version."""

from __future__ import annotations

import pickle
import pickletools

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.contract.messages import (
    NO_SWAP_IN,
    NO_SWAP_OUT,
    SWAP_IN,
    SWAP_OUT,
    BatchRequest,
    BlockCopies,
    BlockHash,
    CacheLevel,
    SwapStep,
)
from fastdeploy_kvcache_v1.contract.swap_message import TIERS, VERSION, SwapDecoder, SwapEncoder, decode, encode
from fastdeploy_kvcache_v1.errors import ConfigError, MessageVersionError, TransferError, UnsupportedCopyError
from fastdeploy_kvcache_v1.scheduler.block_hashing import GivenHashes
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager

OUT = BlockCopies(*SWAP_OUT, (4, 5), (0, 1))
IN = BlockCopies(*SWAP_IN, (2,), (4,))
STORE = BlockCopies(CacheLevel.DEVICE, CacheLevel.STORAGE, (1,), (1,))


def test_a_step_runs_evictions_before_swap_ins_however_they_are_given() -> None:
    """Here the swap-in fills the device slot that the eviction reads."""
    step = SwapStep.of(1, IN, OUT)
    assert step.transfers == (OUT, IN)
    assert (step.swap_out, step.swap_in) == (OUT, IN)


def test_a_step_has_no_empty_copies() -> None:
    step = SwapStep.of(1, NO_SWAP_OUT, NO_SWAP_IN)
    assert not step
    assert step.transfers == ()
    assert (step.swap_out, step.swap_in) == (NO_SWAP_OUT, NO_SWAP_IN)


@pytest.mark.parametrize("transfers", [(IN, OUT), (OUT, OUT), (NO_SWAP_OUT,), (OUT, NO_SWAP_IN)])
def test_a_step_out_of_order_cannot_be_made(transfers: tuple[BlockCopies, ...]) -> None:
    with pytest.raises(ValueError, match="swap step 7 has copies that are empty, duplicate or out of order"):
        SwapStep(7, transfers)


def test_copy_between_tiers_without_a_path_raises_an_error_that_names_them() -> None:
    with pytest.raises(UnsupportedCopyError, match="from the device tier to the storage tier"):
        SwapStep.of(1, OUT, STORE)


def test_a_batch_without_copies_and_requests_is_empty() -> None:
    assert not BatchRequest()
    assert BatchRequest(["r"])
    assert BatchRequest(swap_steps=[SwapStep(1, (OUT,))])


def test_swap_metadata_needs_a_target_per_source() -> None:
    with pytest.raises(ValueError, match="one target per source"):
        BlockCopies(CacheLevel.HOST, CacheLevel.DEVICE, (1,), ())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_device_blocks": 0}, "num_device_blocks must be a whole number of at least 1, got 0"),
        ({"num_host_blocks": -1}, "num_host_blocks must be a whole number of at least 0"),
        ({"block_size": 0}, "block_size must be a whole number of at least 1"),
        ({"write_through_threshold": 0}, "write_through_threshold must be a whole number of at least 1"),
        ({"write_policy": "write_sometimes"}, "write_policy must be one of auto, "),
        ({"num_device_blocks": 1.5}, "must be a whole number of at least"),
        ({"num_host_blocks": True}, "must be a whole number of at least"),
    ],
)
def test_wrong_settings_say_what_to_do(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=r"^[^\n]*$") as caught:
        KVCacheConfig(**{"num_device_blocks": 4, **options})  # type: ignore[arg-type]
    assert message in str(caught.value)


# ---- the one message with the copies of a step


@pytest.mark.parametrize("transfers", [(), (OUT,), (IN,), (OUT, IN)])
@pytest.mark.parametrize("refilled", [(), (5, 0)])
def test_a_step_survives_the_message(transfers: tuple[BlockCopies, ...], refilled: tuple[int, ...]) -> None:
    step = SwapStep(7, transfers, refilled)
    assert decode(pickle.loads(pickle.dumps(encode(step, 3)))) == (step, 3)


def test_the_message_is_plain_data_and_small() -> None:
    """FastDeploy's queue server unpickles it without this package."""
    cache = CacheManager(KVCacheConfig(1000, 1000, block_size=1, write_policy=WritePolicy.WRITE_THROUGH))
    cache.match_prefix("r", GivenHashes([BlockHash(b"%032d" % number) for number in range(900)], 901))
    cache.allocate("r", 900)
    cache.take_swap_step()
    cache.commit("r", 900)
    step = cache.take_swap_step()
    assert len(step.swap_out) == 900
    data = pickle.dumps(encode(step, 0))
    assert len(data) < 900 * 2 * 4 + 1000
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert opcodes.isdisjoint({"GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"}), "it names a class"


def test_a_lost_message_is_an_error_in_the_worker() -> None:
    encoder, decoder = SwapEncoder(), SwapDecoder()
    first, lost, third = (encoder.encode(SwapStep(number, (OUT,))) for number in (0, 1, 4))
    assert decoder.decode(first).step == 0
    with pytest.raises(TransferError, match=r"got swap step 4 behind step 1, expected one behind step 0"):
        decoder.decode(third)
    assert decoder.decode(lost).step == 1, "the chain goes on where it broke"
    assert decoder.decode(third).step == 4


def test_a_chain_that_starts_again_needs_nothing_before_it() -> None:
    encoder, decoder = SwapEncoder(), SwapDecoder()
    decoder.decode(encoder.encode(SwapStep(0, (OUT,))))
    encoder.encode(SwapStep(1, (OUT,)))  # lost with the cache that was reset
    encoder.restart()
    assert decoder.decode(encoder.encode(SwapStep(2, (IN,)))).step == 2


@pytest.mark.parametrize(
    "message",
    [(VERSION + 1, 0, -1, ()), (), (5, -1, (1,), (2,), (), ()), None, SwapStep(0), [VERSION, 0, -1, ()]],
    ids=["later", "empty", "before-versions", "none", "a-step", "a-list"],
)
def test_message_of_another_version_says_got_expected_and_what_to_do(message: object) -> None:
    with pytest.raises(MessageVersionError, match=f"expected {VERSION}.*install one version"):
        SwapDecoder().decode(message)  # type: ignore[arg-type]


def test_every_tier_keeps_its_number() -> None:
    """Numbers of earlier versions of the message must not change their meaning."""
    assert TIERS[:3] == (CacheLevel.DEVICE, CacheLevel.HOST, CacheLevel.STORAGE)
    assert set(TIERS) == set(CacheLevel)
