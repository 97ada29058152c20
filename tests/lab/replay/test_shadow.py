"""The shadow data plane must notice every way in which a manager can be wrong."""

from hashlib import sha256

import pytest

from fastdeploy_kvcache_v1.contract.messages import SWAP_IN, SWAP_OUT, BlockCopies, SwapStep
from fastdeploy_kvcache_v1.errors import InvariantError
from fastdeploy_kvcache_v1.lab.replay.shadow import ShadowDataPlane, ShadowRequest

A, B, C, D = (sha256(name).digest() for name in (b"a", b"b", b"c", b"d"))


def planned(request_id: str, table: list[int], hashes: list[bytes], first_written: int) -> ShadowRequest:
    request = ShadowRequest(request_id)
    request.plan(table, hashes, first_written)
    return request


def step(number, *, out=(), into=()):
    """`out` and `into`: targets by source, as dictionaries."""
    both = (SWAP_OUT, dict(out)), (SWAP_IN, dict(into))
    return SwapStep.of(number, *(BlockCopies(*kind, tuple(each), tuple(each.values())) for kind, each in both))


@pytest.fixture
def shadow() -> ShadowDataPlane:
    """Step 0 has run: request `first` wrote A and B to device slots 0 and 1, and has finished."""
    plane = ShadowDataPlane(num_device_blocks=4, num_host_blocks=4)
    plane.run_step(step(0), [planned("first", [0, 1], [A, B], 0)])
    plane.finish("first")
    return plane


def test_a_block_survives_out_and_in_to_other_slots(shadow):
    shadow.run_step(step(1, out={0: 3, 1: 2}), [planned("other", [0, 1], [C, D], 0)])
    shadow.finish("other")
    shadow.run_step(step(2, into={3: 1, 2: 0}), [planned("again", [1, 0, 2], [A, B, C], 2)])
    assert shadow.num_checked_blocks == 2 + 2 + (2 + 3)


def test_evictions_run_before_the_swap_ins_and_writes_of_their_step(shadow):
    shadow.run_step(step(1, out={0: 0}, into={0: 2}), [planned("reader", [2, 0], [A, C], 1)])
    assert shadow.num_checked_blocks == 2 + (1 + 2)


@pytest.mark.parametrize(
    ("swap", "member", "words"),
    [
        (step(1), planned("r", [1, 0, 2], [A, B, C], 2), "holds the KV of another block"),
        (step(1), planned("r", [0, 3, 2], [A, B, C], 2), "holds the KV of another block"),
        (step(1), planned("r", [0, 0], [A, B], 1), "names a slot twice"),
        (step(1, out={0: 1, 1: 1}), None, "two copies into one slot"),
        (step(1, out={3: 1}), None, "never written"),
        (step(1, into={0: 1}), None, "never written"),
        (step(1, out={0: 4}), None, "out of range"),
        (step(1, out={-1: 0}), None, "out of range"),
        (step(2), None, "swap step 2 was handed out where 1 was due"),
        (step(0), None, "swap step 0 was handed out where 1 was due"),
    ],
)
def test_wrong_steps_are_noticed(shadow, swap, member, words):
    with pytest.raises(InvariantError, match=words):
        shadow.run_step(swap, [member] if member else [])


def test_writing_a_running_requests_slot_is_noticed(shadow):
    shadow.run_step(step(1), [planned("running", [0, 1, 2], [A, B, C], 2)])
    with pytest.raises(InvariantError, match="another request uses"):
        shadow.run_step(step(2), [planned("thief", [2, 3], [C, D], 0)])


def test_swapping_into_a_running_requests_slot_is_noticed(shadow):
    shadow.run_step(step(1, out={0: 0}), [planned("running", [0, 1, 2], [A, B, C], 2)])
    with pytest.raises(InvariantError, match="host to device: writes a slot that a running request uses"):
        shadow.run_step(step(2, into={0: 0}), [])


@pytest.mark.parametrize("reader_first", [True, False])
def test_reading_a_block_that_the_same_step_writes_is_noticed(shadow, reader_first):
    reader, writer = planned("reader", [0, 1], [A, B], 2), planned("writer", [1], [B], 0)
    with pytest.raises(InvariantError, match="another request uses"):
        shadow.run_step(step(1), [reader, writer] if reader_first else [writer, reader])


def test_partial_blocks_belong_to_one_request(shadow):
    shadow.run_step(step(1), [planned("one", [2], [], 0)])
    shadow.finish("one")
    with pytest.raises(InvariantError, match="another block"):
        shadow.run_step(step(2), [planned("two", [2], [], 1)])
