"""A decode server's cache: what a request finds, what is fetched for it, and when others may find that."""

from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.contract.messages import SWAP_OUT, CopyResult
from fastdeploy_kvcache_v1.errors import InvariantError
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation import asked_again
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import INPUTS, KEY, name_of
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.uncached import Uncached
from fastdeploy_kvcache_v1.transfer.rank_messages import StartFetch
from tests.fastdeploy_integration.engine.by_hand import Control, Kind, Status

from .decode_server import PREFIX, DecodeServer
from .fake_requests import request


@pytest.fixture(params=[True, False], ids=["2.6", "2.5"])
def decode(request):
    return DecodeServer(frees_whole=request.param)


def test_a_table_begins_with_what_is_cached_and_the_rest_is_fetched(decode):
    first = decode.granted("a", [*PREFIX, 5])
    assert decode.fetch(first) == StartFetch(name_of(first), tuple(first.block_tables[:4]), 0, -1)
    decode.run(first)
    second = decode.granted("b", [*PREFIX, 6, 6, 6, 6, 6])
    assert second.block_tables[:3] == first.block_tables[:3]
    assert set(second.block_tables[3:]).isdisjoint(first.block_tables)
    assert decode.fetch(second) == StartFetch(name_of(second), tuple(second.block_tables[3:5]), 3, -1)
    decode.run(second)
    for task in (first, second):
        decode.free(task)
    decode.cache.check_idle()
    assert decode.cache.num_recycled_wrongly == 0


def test_what_is_fetched_is_found_when_the_batch_that_runs_it_is_sent(decode):
    first = decode.granted("a", [*PREFIX, 5])

    def found(request_id):
        task = decode.granted(request_id, [*PREFIX, 6])
        decode.arrive(task)
        decode.free(task)
        return decode.fetch(task).first_block

    assert found("while it is fetched") == 0
    decode.arrive(first)
    assert found("without its first token") == 0
    assert decode.take_ready(first)
    assert found("before its batch") == 0
    decode.schedule(first)
    assert found("before its batch is sent") == 0
    decode.cache.batch_sent()
    assert found("then") == 3


@pytest.mark.parametrize("end", ["failed", "cancelled", "no first token"])
def test_a_fetch_without_a_run_leaves_shared_blocks_alone_and_adds_none(decode, end):
    decode.served("a", [*PREFIX, 5])
    task = decode.granted("b", [*PREFIX, *[6] * 9])
    shared = task.block_tables[:3]
    if end != "cancelled":
        decode.arrive(task, "the link broke" if end == "failed" else None)
    decode.free(task, Status.WAITING)
    again = decode.granted("c", [*PREFIX, *[6] * 9])
    assert again.block_tables[:3] == shared
    assert decode.fetch(again).first_block == 3
    if end == "cancelled":
        assert set(again.block_tables).isdisjoint(decode.fetch(task).slots), "bytes may still arrive there"
        assert decode.cache.grants.num_parked == 4
        decode.arrive(task, "it was cancelled")
    decode.complete(again)
    decode.cache.check_idle()


def test_a_request_that_is_asked_for_again_is_hashed_once(monkeypatch):
    """Each time it is another object, with the same name."""
    decode, num_hashed = DecodeServer(6), []
    make = asked_again.TaskTokens
    monkeypatch.setattr(asked_again, "TaskTokens", lambda *args: num_hashed.append(1) or make(*args))
    holder = decode.granted("holder", [9] * 13)
    asked = [request("a", [*PREFIX, 5]) for _ in range(3)]
    for each in asked:
        each.ic_req_data = asked[0].ic_req_data
    assert [decode.preallocate(each) for each in asked[:2]] == [False, False]
    decode.complete(holder)
    assert decode.preallocate(asked[2])
    assert len(num_hashed) == 2, "one each"
    decode.complete(asked[2])
    assert decode.served("b", [*PREFIX, 6]).first_block == 3
    decode.cache.check_idle()


@pytest.mark.parametrize("blocks", [20, 5])
def test_what_is_lost_between_the_match_and_the_blocks_is_fetched(blocks):
    """In five blocks there is no room then, though FastDeploy was told that there is."""
    decode = DecodeServer(blocks)
    decode.served("a", [*PREFIX, 5])
    holder = decode.cache.allocate_gpu_blocks(2, "holder") if blocks == 5 else []
    task = request("b", [*PREFIX, 6])

    def allocate(request):
        assert decode.cache.can_allocate_gpu_blocks(5 - len(holder))
        decode.cache.batch_dropped()
        request.block_tables = decode.cache.allocate_gpu_blocks(5, request.request_id)
        return True

    is_done = decode.cache.preallocate(task, allocate)
    decode.cache.check()
    assert is_done == (blocks == 20)
    if is_done:
        assert decode.fetch(task).first_block == 0
        decode.complete(task)
    decode.cache.recycle_gpu_blocks(holder, "holder")
    decode.cache.check_idle()


def test_another_thread_asks_for_its_own_room():
    decode = DecodeServer(6)
    decode.served("a", [*PREFIX, 5])

    def allocate(task):
        with ThreadPoolExecutor(1) as another:
            rooms = [*another.map(decode.cache.can_allocate_gpu_blocks, (4, 3))]
        assert rooms == [False, True], "three of six are pinned by the request that is given blocks"
        assert decode.cache.can_allocate_gpu_blocks(5)

    assert not decode.cache.preallocate(request("b", [*PREFIX, 6]), allocate)


def image(color, grid, *, moves=1):
    """As prefill has it, with positions that go on `moves` behind it. FastDeploy sends decode no pixels."""
    positions = np.arange(13).repeat(3).reshape(13, 3)
    positions[8:] += moves
    made = {"position_ids": positions, "mm_positions": [SimpleNamespace(offset=2, length=6)], "mm_hashes": ["a uuid"]}
    return {**made, "grid_thw": [grid], "images": np.full((8, 3), color, "uint8")}


@pytest.mark.parametrize("sent", [("position_ids",), ("position_ids", "mm_positions", "mm_hashes")], ids=["2.5", "2.6"])
def test_images_are_told_apart_by_pixels_shape_and_positions(decode, sent):
    """Whatever of them the release sends decode."""

    def found(request_id, inputs, *, is_named=True):
        task = request(request_id, [*PREFIX, 5], multimodal_inputs=inputs)
        if not is_named:
            del task.ic_req_data[INPUTS]
        task.multimodal_inputs = {name: inputs[name] for name in sent}
        assert decode.preallocate(task)
        decode.complete(task)
        return decode.fetch(task).first_block

    wide, high = image(9, [1, 2, 4]), image(9, [1, 4, 2])
    assert found("a", wide, is_named=False) == 0
    assert found("b", wide) == 0, "one that prefill has not named is not cached"
    assert found("c", wide) == 3
    assert found("d", high) == 0
    assert found("e", image(7, [1, 2, 4])) == 0
    assert found("f", high) == 3
    assert decode.served("h", [*PREFIX, 5]).first_block == 0
    assert found("g", {**wide, "images": None}) == 0, "what prefill cannot name"
    assert found("j", image(9, [1, 2, 4], moves=2)) == 2, "the third block is behind the image"
    assert decode.cache.uncached == Uncached(items=2)
    assert decode.served("i", [*PREFIX, 5], cache_salt="another").first_block == 0
    decode.cache.check_idle()


def test_names_of_images_stay_on_a_request_until_it_has_its_blocks():
    """Each of its tokens would carry them to the process that answers."""
    decode = DecodeServer(6)
    holder = decode.granted("holder", [9] * 13)
    task = request("a", [*PREFIX, 5], multimodal_inputs=image(9, [1, 2, 4]))
    name, sent = name_of(task), dict(task.ic_req_data)
    assert not decode.preallocate(task)
    assert task.ic_req_data == sent
    decode.complete(holder)
    assert decode.preallocate(task)
    assert (task.ic_req_data, name_of(task)) == ({KEY: name}, name)
    decode.complete(task)
    again = request("b", [*PREFIX, 5], multimodal_inputs=image(9, [1, 2, 4]))
    assert decode.preallocate(again)
    assert decode.fetch(again).first_block == 3


@pytest.mark.parametrize(
    ("status", "caches_outputs", "found"),
    [(Status.FINISHED, True, 5), (Status.FINISHED, False, 3), (Status.PREEMPTED, True, 3)],
)
def test_outputs_are_cached_as_fastdeploy_is_told_to(decode, status, caches_outputs, found):
    decode.cache.caches_outputs = caches_outputs
    task = decode.granted("a", PREFIX)
    decode.run(task)
    task.block_tables += decode.cache.allocate_gpu_blocks(2, "a")
    task.output_token_ids += [3] * 8  # nine outputs, the last of which was never computed: five full blocks
    decode.free(task, status)
    assert decode.served("b", [*PREFIX, 7, *[3] * 8, 2]).first_block == found
    assert decode.cache.num_recycled_wrongly == 0
    decode.cache.check_idle()


def test_blocks_that_a_lost_batch_gives_back_are_filled_when_the_worker_has_been_told(decode):
    """The worker may have had the batch, and compute: FastDeploy takes its requests back before it schedules again."""
    first = decode.granted("a", [*PREFIX, 5])
    decode.arrive(first)
    assert decode.take_ready(first)
    decode.schedule(first)
    decode.cache.batch_lost()
    decode.free(first, Status.PREEMPTED)
    second = decode.granted("b", [2] * 13)
    assert name_of(second) not in [each.request_id for each in decode.sent]
    (step,) = decode.batch(Control(Kind.PREEMPTED, first))
    assert decode.fetch(second).after_step == step.step


# ---- with a host tier: two prompts of four blocks, which do not fit together


def full(host=8):
    """A server whose device holds a cached prompt, and has room for another one only where that goes."""
    decode = DecodeServer(6, host, write_policy="write_back")
    decode.served("a", [*PREFIX, 5])
    return decode


def test_slots_that_an_eviction_reads_are_filled_after_it_on_an_idle_server():
    decode = full()
    task = decode.granted("b", [2] * 13)
    command = decode.fetch(task)
    assert command.after_step == decode.cache.open_step() >= 0
    carrier = decode.carrier()
    assert carrier is not None, "no other batch would come"
    (step,) = decode.batch(carrier)
    assert step.step == command.after_step
    assert not set(step.swap_out.source_slots).isdisjoint(command.slots)
    assert decode.carrier() is None
    decode.complete(task)
    decode.cache.check_idle()


def pushed_out(decode):
    """To the host: another prompt has its place."""
    other = decode.granted("b", [2] * 13)
    decode.batch(decode.carrier())
    decode.complete(other)


def swapped_in(decode):
    """A request whose first blocks come from the host."""
    pushed_out(decode)
    task = decode.granted("c", [*PREFIX, 6])
    assert decode.fetch(task).first_block == 3
    return task


def test_a_match_behind_copies_that_are_being_sent_begins_behind_them():
    decode = full()
    task = swapped_in(decode)
    decode.schedule(decode.carrier())
    decode.free(task, Status.WAITING)
    decode.arrive(task, "cancelled")
    again = decode.granted("d", [*PREFIX, 6])
    assert again.num_cached_blocks == 3
    assert decode.fetch(again).after_step == decode.fetch(task).after_step
    decode.cache.batch_lost()
    assert [each.request_id for each in decode.lost()] == ["d"], "the same copies"


def test_a_request_whose_copies_were_lost_does_not_run():
    decode = full()
    task, carrier = swapped_in(decode), decode.carrier()
    decode.schedule(carrier)
    decode.cache.batch_lost()
    decode.batch(decode.carrier())
    decode.arrive(task)
    assert not decode.take_ready(task)
    (lost,) = decode.lost()
    assert (lost.request_id, lost.code) == ("c", 502)
    decode.free(task, Status.WAITING)
    assert decode.carrier() is None
    assert decode.served("d", [*PREFIX, 6]).first_block == 0, "nothing can be trusted"


@pytest.mark.parametrize("is_granted", [True, False])
def test_a_request_whose_host_blocks_hold_nothing_does_not_run(monkeypatch, is_granted):
    """The worker says so before a batch has their copies, perhaps while FastDeploy gives it its seat."""
    decode = full()
    failed = CopyResult(1, *SWAP_OUT, 8, 0, 0.0, tuple(range(8)), "x")
    grant = decode.cache.grant
    if is_granted:
        task = swapped_in(decode)
        decode.cache.host_copies_failed([failed])
    else:
        pushed_out(decode)
        monkeypatch.setattr(
            decode.cache, "grant", lambda request: decode.cache.host_copies_failed([failed]) or grant(request)
        )
        task = decode.granted("c", [*PREFIX, 6])
    decode.batch(decode.carrier())
    decode.arrive(task)
    assert not decode.take_ready(task)
    assert [each.request_id for each in decode.lost()] == ["c"]
    decode.free(task, Status.WAITING)
    decode.cache.check_idle()


# ---- what is counted, and what is looked at


def test_hits_are_counted_by_tier_for_requests_that_read_the_cache():
    decode = full()
    rates = decode.cache.hit_rates
    assert (rates.num_requests, rates.num_device_tokens, rates.num_host_tokens) == (1, 0, 0)
    swapped_in(decode)
    assert rates.num_requests == 3
    assert (rates.num_device_tokens + rates.num_host_tokens, rates.num_host_tokens > 0) == (12, True)
    on_device = DecodeServer()
    on_device.served("a", [*PREFIX, 5])
    on_device.served("b", [*PREFIX, 5], skip_reading_prefix_cache=True)
    on_device.granted("c", [*PREFIX, 6])
    rates = on_device.cache.hit_rates
    assert (rates.num_requests, rates.num_device_tokens, rates.num_host_tokens) == (2, 12, 0)


@pytest.mark.parametrize("part", ["manager", "grants", "grants.ledger", "_lent"])
def test_a_check_looks_at_every_part(decode, monkeypatch, part):
    def found(*_):
        raise InvariantError("injected")

    monkeypatch.setattr(attrgetter(part)(decode.cache), "check", found)
    for check in (decode.cache.check, decode.cache.check_idle):
        with pytest.raises(InvariantError, match="injected"):
            check()
