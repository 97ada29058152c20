"""What names a prompt beside its token ids: taken once, at arrival, and never from what a client says of it."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_kvcache_v1.errors import ConfigError
from fastdeploy_kvcache_v1.fastdeploy_integration.engine import patches, prompt_inputs
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.prompt_inputs import (
    ATTRIBUTE,
    NO_INPUTS,
    inputs_of,
    token_rows,
)
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.task_tokens import TaskTokens
from fastdeploy_kvcache_v1.fastdeploy_integration.engine.uncached import Uncached

from .by_hand import FakeTask, Status, begin, end, make_adapter, served

BLOCK = 4
PROMPT = list(range(1, 30))


def text(count):
    return np.arange(count).repeat(3).reshape(count, 3)


def names(prompt=PROMPT, outputs=(), **inputs):
    task = FakeTask("r", prompt, items=inputs)
    task.output_token_ids.extend(outputs)
    return TaskTokens(task, BLOCK).hashes


def num_shared(one, other):
    return sum(a == b for a, b in zip(one, other, strict=False))


def pixels(*grids, color=3, at=2):
    """Items of `grids` one behind the other, one token each for a patch."""
    counts = [int(np.prod(grid)) for grid in grids]
    offsets = [at + sum(counts[:index]) for index in range(len(grids))]
    positions = [SimpleNamespace(offset=offset, length=count) for offset, count in zip(offsets, counts, strict=True)]
    images = np.full((sum(counts), 6), color, "uint8")
    return {"mm_positions": positions, "mm_hashes": ["h"] * len(grids), "grid_thw": list(grids), "images": images}


@pytest.mark.parametrize("inputs", [{}, {"position_ids": text(29)}, {"position_ids": text(40)}, {"images": None}])
def test_a_prompt_of_text_has_the_names_of_its_tokens(inputs):
    assert names(outputs=range(20), **inputs) == names(outputs=range(20))


def test_text_leaves_nothing_on_its_request():
    for nothing in (None, {}):
        task = FakeTask("r", PROMPT, items=nothing)
        assert inputs_of(task) is NO_INPUTS
        assert ATTRIBUTE not in vars(task)


@pytest.mark.parametrize("token", range(29))
@pytest.mark.parametrize("axis", range(3))
def test_another_position_of_a_token_is_another_name_from_its_block_on(token, axis):
    rows = text(29)
    rows[:, 1] += 100
    other = rows.copy()
    other[token, axis] += 1
    assert num_shared(names(position_ids=rows), names(position_ids=other)) == token // BLOCK


def test_positions_go_on_behind_the_last_one_whether_told_or_not():
    """As FastDeploy's rotary embedding goes on, also for a prompt that was cut and has more of them than tokens."""
    rows = text(29) + 7
    outputs = range(16)
    assert names(outputs=outputs, position_ids=rows) == names(outputs=outputs, position_ids=text(45) + 7)
    high = rows.copy()
    high[5, 2] = 50
    told = np.concatenate([high, text(16) + 51])
    assert names(outputs=outputs, position_ids=high) == names(outputs=outputs, position_ids=told)
    assert names(PROMPT[:9], outputs, position_ids=high) == names(PROMPT[:9], outputs, position_ids=told)


def test_offsets_in_the_attention_mask_are_in_the_name_where_they_are_given():
    plain, ones = names(), names(attention_mask_offset=np.ones(29, int))
    other = np.ones(29, int)
    other[13] = 2
    assert num_shared(plain, ones) == 0
    assert num_shared(ones, names(attention_mask_offset=other)) == 3
    assert num_shared(ones, names(attention_mask_offset=np.ones((29, 2), int))) == 0


@pytest.mark.parametrize("wrong", [[0], text(9).astype(float), text(9)[:, :2], "x", [[None] * 3]])
def test_positions_that_are_no_rows_of_three_numbers_are_refused(wrong):
    with pytest.raises(ConfigError, match=r"position_ids|array of numbers"):
        token_rows(wrong, None)


def test_a_hash_that_a_client_gives_names_nothing():
    one = pixels((1, 2, 2))
    assert names(**one) == names(**{**one, "mm_hashes": ["a uuid"]})
    assert num_shared(names(**one), names(**pixels((1, 2, 2), color=4))) == 0


@pytest.mark.parametrize("kind", ["shape", "dtype", "width"])
def test_equal_bytes_are_another_image_in_another_form(kind):
    one = pixels((1, 2, 4))
    other = {
        "shape": lambda: pixels((1, 4, 2)),
        "dtype": lambda: {**one, "images": one["images"].view("int8")},
        "width": lambda: {**one, "images": np.full((8, 3), 3 * 257, "uint16").view("uint8").reshape(8, 2, 3)},
    }[kind]()
    assert other["images"].tobytes() == one["images"].tobytes()
    assert num_shared(names(**one), names(**other)) == 0


def test_videos_share_their_first_steps():
    short, long = pixels((4, 1, 4), at=0), pixels((6, 1, 4), at=0)
    long["images"][20:] = 9
    assert num_shared(names(**short), names(**long)) == 4
    long["images"][12:] = 9
    assert num_shared(names(**short), names(**long)) == 2


@pytest.mark.parametrize("late", ["image_feature_urls", "video_feature_urls", "audio_feature_urls", "image_features"])
def test_what_is_before_features_that_come_later_is_cached(late):
    cache = make_adapter(40)
    inputs = {late: ["url"], "image_patch_id": 23, "video_patch_id": None}
    for found in (0, 20):
        assert served(cache, FakeTask("r", PROMPT, items=inputs)) == found
    assert cache.uncached == Uncached(items=2)
    assert served(cache, FakeTask("r", PROMPT)) == 20, "text before them is text"
    assert served(cache, FakeTask("r", PROMPT, items={late: ["url"]})) == 0, "nobody knows where they are"


def test_pixels_are_digested_once_before_any_lock_is_taken(monkeypatch):
    cache, digested, digest = make_adapter(40), [], prompt_inputs._digest
    queue = []
    manager = SimpleNamespace(cache_manager=cache)
    monkeypatch.setattr(patches, "EnginePrefixCache", type(cache))

    class Lock:
        is_held = False

        def __enter__(self):
            Lock.is_held = True

        def __exit__(self, *_):
            Lock.is_held = False

    cache.arrivals, cache.held_back = Lock(), SimpleNamespace(hold=lambda *_: False)

    def count(rows):
        assert not Lock.is_held
        digested.append(len(rows))
        return digest(rows)

    monkeypatch.setattr(prompt_inputs, "_digest", count)
    task = FakeTask("r", PROMPT, items=pixels((4, 1, 2), (1, 2, 2)))
    for _ in range(3):  # it comes back from where it waits
        patches.add_request(queue.append, manager, (task,), {})
    assert (queue, digested) == ([task] * 3, [4, 4, 4])
    for _ in range(100):
        cache.expect([task])
        cache.request_match_blocks(task, BLOCK)
        cache.release_block_ids(task)
    begin(cache, task)
    cache.send_swaps([task])
    cache.batch_sent()
    end(cache, task, Status.PREEMPTED)
    cache._kept.clear()
    task.multimodal_inputs = {"mm_positions": None}
    assert begin(cache, task) == 28
    assert digested == [4, 4, 4]


@pytest.mark.parametrize("forged", [None, [], {"items": []}, "x"])
def test_what_a_client_writes_over_it_is_not_believed(forged):
    task = FakeTask("r", PROMPT, items=pixels((1, 2, 2)))
    setattr(task, ATTRIBUTE, forged)
    assert TaskTokens(task, BLOCK).hashes == names(**pixels((1, 2, 2)))
    assert pickle.loads(pickle.dumps(inputs_of(task))) is None, "it stays in the engine"


def test_requests_without_the_cache_are_counted_once_by_reason():
    cache = make_adapter(40)
    tasks = [FakeTask("a", PROMPT), FakeTask("a", PROMPT), FakeTask("b", [-1] * 9)]
    tasks.append(FakeTask("c", PROMPT, items={**pixels((1, 2, 2)), "images": None}))
    for task in tasks * 3:
        cache.request_match_blocks(task, BLOCK)
    assert cache.uncached == Uncached(same_id=1, tokens=1, items=1)
