"""Names of blocks: once per request, images included, and what cannot be named is served without the cache."""

import numpy as np
import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.asked_again import AskedAgain
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.transfer_name import give_name, name_of
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import adapter, waiting_requests
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.kept_hashes import KEPT_HASHES, KeptHashes
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.task_tokens import TaskTokens, start_of_cut_item
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.uncached import Uncached
from fastdeploy_kvcache_v1.scheduler.reuse.history import FIRST_TURN, TOOL_CALL

from .by_hand import Control, FakeTask, Kind, Server, Status, begin, end, make_adapter, served


@pytest.fixture
def hashed(monkeypatch):
    """Ids of the requests that were hashed, in order."""
    ids = []

    class Counted(TaskTokens):
        def __init__(self, task, block_size):
            ids.append(task.request_id)
            super().__init__(task, block_size)

    for module in (adapter, waiting_requests):
        monkeypatch.setattr(module, "TaskTokens", Counted)
    return ids


def test_a_request_that_waits_is_hashed_once_whatever_becomes_of_its_images(hashed):
    cache = make_adapter(8)
    task = FakeTask("x", [1] * 9, items=images((1, 2)))
    for number in range(100):
        cache.request_match_blocks(task, 4)
        cache.release_block_ids(task)
        task.multimodal_inputs |= {"mm_positions": [Position(number, 1)] * 2, "images": None}
    assert hashed == ["x"]


def test_a_line_is_hashed_one_request_a_step_and_not_again_at_the_match(hashed):
    cache = make_adapter(8)
    line = [FakeTask("a", [1] * 9, items=images((1, 2))), *(FakeTask(name, [1] * 9) for name in "bc")]
    for number in range(5):
        assert hashed == list("abc")[:number]
        cache.expect(line)
    for task in line:
        cache.request_match_blocks(task, 4)
    assert hashed == list("abc")


def test_a_request_without_tokens_in_the_line_does_no_harm():
    cache = make_adapter(6)
    broken = FakeTask("broken", [1] * 9)
    broken.prompt_token_ids = None
    cache.expect([broken, FakeTask("a", [1] * 9)])


def test_hashes_of_aborted_requests_are_not_kept():
    cache, tasks = make_adapter(20), [FakeTask(name, [1] * 9) for name in "ab"]
    for task in tasks:
        begin(cache, task)
        end(cache, task, Status.PREEMPTED)  # the host says the same of aborted requests
    cache.send_swaps([Control(Kind.ABORT, tasks[0])])
    assert list(cache._kept._kept) == ["b"]


class Position:
    def __init__(self, offset, length):
        self.offset, self.length = offset, length


class Unprintable:
    def __str__(self):
        raise RuntimeError("no text")


def images(*positions):
    count = len(positions)
    inputs = {"mm_positions": [Position(*position) for position in positions], "mm_hashes": ["a uuid"] * count}
    return {**inputs, "grid_thw": [[1, 1, 1]] * count, "images": np.zeros([count, 3])}


def test_a_match_never_ends_inside_an_image():
    """The image covers [6, 30); the second prompt differs at 24, in the middle of it."""
    cache, cached = make_adapter(40), []
    for name, tail in (("a", []), ("b", [7])):
        task = FakeTask(name, [1] * 6 + [2] * 18 + tail + [2] * 12, items=images((6, 24)))
        cached.append(served(cache, task))
    assert (cached, cache.hit_rates.num_device_tokens) == ([0, 4], 4)


POISON = [
    images((2, 6), (4, 3)),
    *(
        images((0, 2)) | changed
        for changed in (
            {"images": None},
            {"grid_thw": None},
            {"grid_thw": [[1, 2, 1]]},
            {"grid_thw": [[1, -1, -1]]},
            {"grid_thw": [[1, 1, 1]] * 2},
            {"images": [[Unprintable()]]},
            {"mm_positions": [None]},
            {"mm_positions": [Position("x", 2)]},
            {"mm_positions": 7},
            {"mm_positions": np.ones((2, 2))},
            {"position_ids": [0]},
            {"position_ids": np.zeros((12, 3))},
            {"attention_mask_offset": ["x"]},
        )
    ),
    ["h"],
]


@pytest.mark.parametrize("items", POISON)
def test_a_request_that_cannot_be_hashed_is_served_without_caching_and_lets_the_others_pass(items, caplog):
    """The host would schedule nothing behind a request whose match raises."""
    server = Server(40)
    names = "before", "poisoned", "behind", "poisoned again", "last"
    tasks = [server.add(name, [1] * 12, 3) for name in names]
    tasks[1].multimodal_inputs = tasks[3].multimodal_inputs = items
    assert server.is_idle
    assert [task.prefill_start_index for task in tasks] == [0, 0, 8, 0, 8]
    assert "request poisoned is served without the cache, its tokens cannot be hashed" in caplog.text
    assert "matching it failed" not in caplog.text
    assert server.clients.num_ended == {"finished": 5}
    counted = server.host.cache_manager.uncached
    assert counted in (Uncached(items=2), Uncached(tokens=2))


def test_a_match_that_fails_in_the_cache_itself_leaves_no_trace(monkeypatch, caplog):
    cache = make_adapter(7)
    served(cache, FakeTask("r", [1] * 9))

    def broken(*_):
        raise RuntimeError("a defect of ours")

    with monkeypatch.context() as patched:
        patched.setattr(cache.manager, "allocate", broken)
        task = FakeTask("x", [1] * 9)
        assert cache.request_match_blocks(task, 4)[:2] == ([], 0)
    assert "request x is served without the cache: matching it failed" in caplog.text
    assert "a defect of ours" in caplog.text
    assert cache.uncached == Uncached(failed=1)
    cache.check()
    cache.manager.check_idle()
    assert cache.request_match_blocks(task, 4)[1] == 8


@pytest.mark.parametrize("kept", [KeptHashes, lambda: AskedAgain(4)])
def test_hashes_of_the_latest_requests_are_kept(kept):
    kept, tasks = kept(), [FakeTask(str(number), [1] * 9) for number in range(KEPT_HASHES + 1)]
    for task in tasks:
        task.ic_req_data = None
        give_name(task)
        kept.keep(TaskTokens(task, 4))
    assert len(kept._kept) == KEPT_HASHES
    first, second, *_, last = (name_of(task) if isinstance(kept, AskedAgain) else task.request_id for task in tasks)
    assert first not in kept._kept
    assert {second, last} <= kept._kept.keys()
    if isinstance(kept, KeptHashes):
        kept.check()
        kept.clear()
        assert kept.take(tasks[-1]) is None


def test_hashes_that_were_kept_take_over_what_was_generated_since():
    kept, task = KeptHashes(), FakeTask("a", [1] * 9)
    kept.keep(TaskTokens(task, 4))
    task.output_token_ids += [2] * 4
    assert kept.look(task).num_tokens == 9
    taken = kept.take(task)
    assert (taken.num_tokens, len(taken.hashes), taken.token_ids()) == (13, 3, [1] * 9 + [2] * 4)
    assert kept.take(task) is None, "kept no longer"


@pytest.mark.parametrize(
    ("change", "is_reusable"),
    [
        (lambda task: None, True),
        (lambda task: task.prompt_token_ids.append(1), False),
        (lambda task: task.output_token_ids.append(1), True),
        (lambda task: task.output_token_ids.clear(), False),
        (lambda task: FakeTask("a", [2] * 9), False),
    ],
    ids=["nothing", "a longer prompt", "an output", "an output less", "another one of its id and length"],
)
def test_hashes_are_those_of_a_request_as_long_as_it_only_grows(change, is_reusable):
    task = FakeTask("a", [1] * 9)
    task.output_token_ids.append(7)
    tokens = TaskTokens(task, 4)
    assert tokens.is_of(change(task) or task) is is_reusable


def test_outputs_that_cannot_be_hashed_end_caching(caplog):
    task = FakeTask("a", [1] * 9)
    tokens = TaskTokens(task, 4)
    task.output_token_ids.append(-1)
    tokens.catch_up()
    assert (tokens.hashes, tokens.num_tokens, tokens.num_plain_blocks) == ((), 10, 0)
    assert "request a is served without the cache, its tokens cannot be hashed" in caplog.text
    assert tokens.is_of(task), "it is not tried again"


@pytest.mark.parametrize(
    ("num_tokens", "start"), [(5, 5), (9, 9), (10, 8), (11, 8), (12, 12), (14, 14), (17, 17), (18, 16), (20, 20)]
)
def test_a_table_ends_before_an_item_that_it_would_cut(num_tokens, start):
    """Items cover [9, 12), [14, 15) and [17, 20)."""
    task = FakeTask("x", [1] * 30, items=images((9, 3), (12, 0), (14, 1), (17, 3)))
    assert start_of_cut_item(task, num_tokens, 4) == start


@pytest.mark.parametrize(("output", "use_class"), [([1, 7, 2], TOOL_CALL), ([1, 2], FIRST_TURN)])
def test_cache_learns_whether_the_answer_ended_in_a_tool_call(output, use_class):
    cache, task = make_adapter(8), FakeTask("a", [1] * 9)
    cache.tool_call_ends = frozenset({7})
    task.output_token_ids += output
    served(cache, task)
    assert {run.use_class for run in cache.manager._tree.runs()} == {use_class}
