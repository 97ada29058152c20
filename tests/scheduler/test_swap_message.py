"""The one message with the copies of a step: plain data, in a chain, with a version."""

from __future__ import annotations

import pickle
import pickletools

import pytest

from fastdeploy_kvcache_v1.config import KVCacheConfig, WritePolicy
from fastdeploy_kvcache_v1.errors import MessageVersionError, TransferError
from fastdeploy_kvcache_v1.metadata import EVICT, SWAP_IN, BlockHash, CacheLevel, CacheSwapMetadata, SwapStep
from fastdeploy_kvcache_v1.scheduler.cache_manager import CacheManager
from fastdeploy_kvcache_v1.scheduler.cache_utils import GivenHashes
from fastdeploy_kvcache_v1.swap_message import TIERS, VERSION, SwapDecoder, SwapEncoder, decode, encode

OUT = CacheSwapMetadata(*EVICT, (4, 5), (0, 1))
IN = CacheSwapMetadata(*SWAP_IN, (2,), (4,))


@pytest.mark.parametrize("transfers", [(), (OUT,), (IN,), (OUT, IN)])
def test_a_step_survives_the_message(transfers: tuple[CacheSwapMetadata, ...]) -> None:
    step = SwapStep(7, transfers)
    assert decode(pickle.loads(pickle.dumps(encode(step, 3)))) == (step, 3)


def test_the_message_is_plain_data_and_small() -> None:
    """FastDeploy's queue server unpickles it without this package."""
    cache = CacheManager(KVCacheConfig(1000, 1000, block_size=1, write_policy=WritePolicy.WRITE_THROUGH))
    cache.match_prefix("r", GivenHashes([BlockHash(b"%032d" % number) for number in range(900)], 901))
    cache.allocate("r", 900)
    cache.take_swap_step()
    cache.commit("r", 900)
    step = cache.take_swap_step()
    assert len(step.evict) == 900
    data = pickle.dumps(encode(step, 0))
    assert len(data) < 900 * 2 * 4 + 1000
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert opcodes.isdisjoint({"GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD"}), "it names a class"


def test_a_lost_message_is_an_error_in_the_worker() -> None:
    encoder, decoder = SwapEncoder(), SwapDecoder()
    first, lost, third = (encoder.encode(SwapStep(number, (OUT,))) for number in (0, 1, 4))
    assert decoder.decode(first).step == 0
    with pytest.raises(TransferError, match=r"swap step 4 follows step 1, but the last one that arrived is 0"):
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
def test_a_message_of_another_version_says_which_and_what_to_do(message: object) -> None:
    with pytest.raises(MessageVersionError, match=f"reads version {VERSION}.*install one version"):
        SwapDecoder().decode(message)  # type: ignore[arg-type]


def test_every_tier_keeps_its_number() -> None:
    """Numbers of earlier versions of the message must not change their meaning."""
    assert TIERS[:3] == (CacheLevel.DEVICE, CacheLevel.HOST, CacheLevel.STORAGE)
    assert set(TIERS) == set(CacheLevel)
