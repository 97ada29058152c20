"""A prefill server's cache, asked in FastDeploy's order: blocks first, the batch much later."""

from fastdeploy_kvcache_v1.config import WritePolicy
from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.prefill_adapter import PrefillAdapter
from tests.fastdeploy_integration.engine.by_hand import FakeTask, Status, make_adapter

BLOCK = 4


def adapter(blocks=20, host=0, **settings):
    return make_adapter(blocks, host, kind=PrefillAdapter, **settings)


def match(cache, task):
    task.block_tables, task.num_computed_tokens, _ = cache.request_match_blocks(task, BLOCK)
    return True


def preallocate(cache, task, spare=1):
    """As both releases do: match, all blocks of the prompt and some more. 2.6 then says that all of it is computed."""
    match(cache, task)
    assert (task.block_tables, task.num_computed_tokens) == ([], 0), "nothing is found before its batch"
    count = -(-len(task.prompt_token_ids) // BLOCK) + spare
    task.block_tables = cache.allocate_gpu_blocks(count, task.request_id)
    cache.update_cache_blocks(task, BLOCK, len(task.prompt_token_ids))
    cache.check()


def start(cache, task):
    """FastDeploy puts it into a batch; returns the tokens that it has found."""

    num_blocks = len(task.block_tables)
    cache.start(task, lambda each: match(cache, each))
    assert len(task.block_tables) == num_blocks
    cache.check()
    return task.num_computed_tokens


def schedule(cache, task, num_tokens):
    """A chunk of a request that has its blocks; returns the tokens that it has found."""
    found = start(cache, task)
    task.prefill_start_index = task.num_computed_tokens
    task.prefill_end_index = task.num_computed_tokens = task.num_computed_tokens + num_tokens
    cache.update_cache_blocks(task, BLOCK, task.num_computed_tokens)  # 2.5 says it here, too
    cache.send_swaps([task])
    cache.check()
    return found


def end(cache, task):
    cache.release_block_ids(task)
    cache.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)
    cache.check()


def done(cache, *tasks):
    """All that there were."""
    for task in tasks:
        end(cache, task)
    cache.manager.check_idle()


def computed(cache, task):
    """The whole prompt, in one batch that is sent."""
    preallocate(cache, task)
    found = start(cache, task)
    schedule(cache, task, len(task.prompt_token_ids) - found)
    cache.batch_sent()
    return found


def test_its_own_blocks_do_not_push_out_what_it_will_find():
    cache = adapter(10)
    for token in (1, 2):
        computed(cache, task := FakeTask("old", [token] * 9))
        end(cache, task)
    again = FakeTask("again", [1] * 9)
    preallocate(cache, again, spare=4)  # seven blocks, of ten: one cached block goes, and not the oldest
    assert schedule(cache, again, 1) == 8


def two(blocks=20, spare=1):
    """The second shares the first one's prefix of three blocks, and has blocks of its own."""
    cache, first, second = adapter(blocks), FakeTask("a", [*[1] * 12, 5]), FakeTask("b", [*[1] * 12, 6])
    computed(cache, first)
    preallocate(cache, second, spare)
    return cache, first, second


def test_a_request_that_its_batch_did_not_take_has_its_own_blocks_again():
    """`schedule` raises, or takes no token of it: it is matched anew by the next batch."""
    cache, first, second = two()
    assert start(cache, second) == 12
    cache.batch_lost()
    assert (len(second.block_tables), second.num_cached_blocks, second.num_computed_tokens) == (5, 0, 0)
    assert set(second.block_tables).isdisjoint(first.block_tables)
    assert schedule(cache, second, 1) == 12
    cache.batch_sent()
    done(cache, first, second)


def test_a_request_whose_match_fails_is_computed_whole():
    cache, first, second = two()
    cache.start(second, lambda task: not match(cache, task))  # what comes behind it raised
    assert (len(second.block_tables), second.num_cached_blocks, second.num_computed_tokens) == (5, 0, 0)
    done(cache, first, second)


def test_batches_that_are_lost_on_a_full_device_cost_no_request_a_block():
    """Cached blocks stay where others read them, and what they took the place of may be wanted at once."""
    cache, first, second = two(9, spare=0)
    for _ in range(3):
        start(cache, second)
        assert not cache.can_allocate_gpu_blocks(1), "three are spared"
        cache.batch_lost()
        cache.check()
        assert (len(second.block_tables), second.num_cached_blocks) == (4, 0)
        assert not cache.can_allocate_gpu_blocks(1)
    assert schedule(cache, second, 1) == 12
    assert cache.can_allocate_gpu_blocks(3), "the batch is there"
    cache.batch_sent()
    done(cache, first, second)


def test_two_that_load_the_same_blocks_both_have_their_own_again():
    cache, prompt = adapter(8, host=8, write_policy=WritePolicy.WRITE_BACK), [1] * 12
    for task in (FakeTask("a", [*prompt, 5]), FakeTask("other", [9] * 28)):
        computed(cache, task)
        end(cache, task)
    both = [FakeTask("b", [*prompt, 6]), FakeTask("c", [*prompt, 7])]
    for task in both:
        preallocate(cache, task, spare=0)
    assert not cache.can_allocate_gpu_blocks(1)
    for _ in range(2):
        for task in both:
            start(cache, task)
        cache.batch_lost()
        cache.check()
        assert [(len(task.block_tables), task.num_cached_blocks) for task in both] == [(4, 0)] * 2
        assert len({slot for task in both for slot in task.block_tables}) == 8
    done(cache, *both)


def preempt(cache, task):
    task.status, task.idx = Status.PREEMPTED, 0
    end(cache, task)
    task.block_tables, task.num_cached_blocks, task.num_computed_tokens = [], 0, 0


def test_a_preempted_request_waits_for_room_for_all_of_it():
    """It is computed in chunks, and FastDeploy 2.6 would take blocks for the second one without asking."""
    cache = adapter(8)
    preempted, other = FakeTask("p", [1] * 20), FakeTask("o", [2] * 16)
    computed(cache, preempted)
    preempt(cache, preempted)
    cache.manager.reset_cache()
    preallocate(cache, other, spare=0)
    assert cache.can_allocate_gpu_blocks(4), "enough for a first chunk"
    assert not cache.may_match(preempted)
    fresh = FakeTask("f", [3] * 20)
    fresh.idx = None
    assert cache.may_match(fresh), "one without a seat is given blocks first"
    end(cache, other)
    assert cache.may_match(preempted)
    match(cache, preempted)
    cache.start(preempted, None)
    assert len(preempted.block_tables) == 5
    cache.batch_lost()
    assert (preempted.block_tables, cache.can_allocate_gpu_blocks(8)) == ([], True)


def test_a_preempted_request_that_goes_on_as_a_new_one_has_no_blocks_of_its_own_to_keep():
    cache, task = adapter(8), FakeTask("p", [1] * 20)
    computed(cache, task)
    preempt(cache, task)
    task.status = Status.WAITING
    for _ in range(2):
        assert cache.may_match(task)
        match(cache, task)
        assert task.block_tables == []
        cache.start(task, lambda each: match(cache, each))
        assert len(task.block_tables) == 5
        cache.batch_lost()
        assert (task.block_tables, cache.can_allocate_gpu_blocks(8)) == ([], True)
        cache.check()
