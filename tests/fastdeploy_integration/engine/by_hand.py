"""The calls with which FastDeploy begins and ends one request, where a test needs no scheduler."""

from .fake_scheduler import FakeTask, Status


def begin(cache, task, num_tokens=None):
    """Match it, give it blocks for all of its prompt, and schedule its first `num_tokens`. Returns what was cached."""
    size = cache.manager.config.block_size
    task.block_tables, num_cached, _ = cache.request_match_blocks(task, size)
    missing = -(-len(task.prompt_token_ids) // size) - len(task.block_tables)
    task.block_tables.extend(cache.allocate_gpu_blocks(missing, task.request_id))
    cache.update_cache_blocks(task, size, len(task.prompt_token_ids) if num_tokens is None else num_tokens)
    return num_cached


def end(cache, task, status=Status.FINISHED):
    task.status = status
    cache.release_block_ids(task)
    cache.recycle_gpu_blocks(task.block_tables[task.num_cached_blocks :], task.request_id)


def found(cache, tokens):
    """How many tokens of a prompt are cached."""
    probe = FakeTask("probe", tokens)
    _, num_cached, _ = cache.request_match_blocks(probe, cache.manager.config.block_size)
    cache.release_block_ids(probe)
    return num_cached
