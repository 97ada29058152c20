"""Shared by the tests of the engine core: a small cache and requests that share prefixes."""

import random

from fastdeploy_kvcache_v1.config import KVCacheConfig
from tests.embedded.shadow import expected_outputs


def small(num_device_blocks=8, num_host_blocks=16, **options):
    return KVCacheConfig(num_device_blocks, num_host_blocks, block_size=4, **options)


def random_requests(seed, count):
    """Prompts that share prefixes, some continuing others; every one fits eight blocks of four tokens."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(100) for _ in range(rng.randrange(4, 13))] for _ in range(5)]
    requests = []
    for index in range(count):
        prompt = rng.choice(prefixes) + [rng.randrange(100) for _ in range(rng.randrange(1, 6))]
        output = rng.randrange(1, 9)
        requests.append((f"r{index}", prompt, output))
        if rng.random() < 0.3 and len(prompt) + output < 20:
            prefixes.append(prompt + expected_outputs(prompt, output))
    return requests
