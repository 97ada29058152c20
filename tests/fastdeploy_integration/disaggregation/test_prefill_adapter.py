"""A prefill server's cache, asked in FastDeploy's order: blocks first, the batch much later."""

from fastdeploy_kvcache_v1.fastdeploy_integration.disaggregation.prefill_adapter import PrefillAdapter
from tests.fastdeploy_integration.engine.fake_scheduler import FakeTask, make_adapter

BLOCK = 4


def adapter(blocks=20, host=0, **settings):
    return make_adapter(blocks, host, kind=PrefillAdapter, **settings)


def preallocate(cache, task, spare=1):
    """As both releases do: match, all blocks of the prompt and some more. 2.6 then says that all of it is computed."""
    table, num_tokens, _ = cache.request_match_blocks(task, BLOCK)
    count = -(-len(task.prompt_token_ids) // BLOCK) + spare - len(table)
    task.block_tables = [*table, *cache.allocate_gpu_blocks(count, task.request_id)]
    task.num_computed_tokens = num_tokens
    cache.update_cache_blocks(task, BLOCK, len(task.prompt_token_ids))
    cache.check()
    return num_tokens


def schedule(cache, task, num_tokens):
    """A chunk of a request that has its blocks."""
    task.prefill_start_index = task.num_computed_tokens
    task.prefill_end_index = task.num_computed_tokens = task.num_computed_tokens + num_tokens
    cache.update_cache_blocks(task, BLOCK, task.num_computed_tokens)  # 2.5 says it here, too
    cache.send_swaps([task])
    cache.check()


def end(cache, task):
    cache.release_block_ids(task)
    cache.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)
    cache.check()


def test_nobody_matches_what_was_only_given_out():
    """B comes while A waits for its decode server: A's blocks hold nothing yet."""
    cache, prompt = adapter(), [1] * 12
    first, second, third = FakeTask("a", [*prompt, 5]), FakeTask("b", [*prompt, 6]), FakeTask("c", [*prompt, 7])
    assert preallocate(cache, first) == 0
    other = FakeTask("other", [9] * 5)
    preallocate(cache, other)
    schedule(cache, other, 5)
    cache.batch_sent()
    end(cache, other)
    assert preallocate(cache, second) == 0
    schedule(cache, first, 13)
    cache.batch_sent()
    assert preallocate(cache, third) == 12
    for task in (first, second, third):
        end(cache, task)
    cache.manager.check_idle()


def test_only_the_chunks_of_sent_batches_are_matched():
    cache, prompt = adapter(), [1] * 16
    first = FakeTask("a", [*prompt, 5])
    preallocate(cache, first)
    schedule(cache, first, 8)
    assert preallocate(cache, FakeTask("b", [*prompt, 6])) == 0, "the batch is not in the queue"
    cache.batch_sent()
    assert preallocate(cache, FakeTask("c", [*prompt, 6])) == 8
    schedule(cache, first, 9)
    cache.batch_sent()
    assert preallocate(cache, FakeTask("d", [*prompt, 6])) == 16


def test_a_match_outlives_the_batches_of_others():
    """Mixed servers take a match back that no batch used: here it waits for a decode server."""
    cache, prompt = adapter(), [1] * 12
    first = FakeTask("a", [*prompt, 5])
    preallocate(cache, first)
    schedule(cache, first, 13)
    cache.batch_sent()
    waiting, other = FakeTask("b", [*prompt, 6]), FakeTask("c", [9] * 9)
    assert preallocate(cache, waiting) == 12
    table = list(waiting.block_tables)
    preallocate(cache, other)
    schedule(cache, other, 9)
    cache.batch_sent()
    cache.send_swaps([])
    assert waiting.block_tables == table
    assert waiting.num_cached_blocks == 3
    end(cache, first)
    preallocate(cache, FakeTask("d", [8] * 24))
    schedule(cache, waiting, 1)
    cache.batch_sent()
    end(cache, waiting)


def test_a_request_that_no_decode_server_takes_gives_everything_back():
    cache, prompt = adapter(), [1] * 12
    first = FakeTask("a", [*prompt, 5])
    preallocate(cache, first)
    schedule(cache, first, 13)
    cache.batch_sent()
    end(cache, first)
    free = cache.manager.num_available_device_blocks
    refused = FakeTask("b", [*prompt, 6])
    assert preallocate(cache, refused) == 12
    end(cache, refused)
    assert cache.manager.num_available_device_blocks == free
    cache.manager.check_idle()


def test_a_lost_batch_leaves_nothing_to_be_matched():
    cache, prompt = adapter(), [1] * 12
    first = FakeTask("a", [*prompt, 5])
    preallocate(cache, first)
    schedule(cache, first, 13)
    cache.batch_lost()
    assert preallocate(cache, FakeTask("b", [*prompt, 6])) == 0
    cache.check()
