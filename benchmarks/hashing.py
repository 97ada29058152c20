"""Time to hash a prompt into block hashes, beside the same chain of SHA-256 digests alone.
Also the time for one more generated token, behind prompts of several lengths.
"""

from __future__ import annotations

from hashlib import sha256
from time import perf_counter

import numpy as np
from _support import begin, median, sized

from fastdeploy_kvcache_v1.config import KVCacheConfig
from fastdeploy_kvcache_v1.scheduler.block_hashing import BlockHasher

BLOCK_SIZE = KVCacheConfig.block_size
PROMPT_TOKENS = 131_072
ROUNDS = sized(60, 1)
LENGTHS = (1_024, 16_384, 131_072)


def prompt(num_tokens: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 150_000, num_tokens, dtype=np.int64)


def hash_prompt(tokens: np.ndarray) -> float:
    begin = perf_counter()
    hasher = BlockHasher(BLOCK_SIZE)
    hasher.extend(tokens)
    seconds = perf_counter() - begin
    assert len(hasher.hashes) == PROMPT_TOKENS // BLOCK_SIZE
    return seconds


def digests_alone(tokens: np.ndarray) -> float:
    """The same chain of SHA-256 digests over ready-made bytes."""
    data, step = tokens.astype("<u4").tobytes(), BLOCK_SIZE * 4
    begin = perf_counter()
    parent = b""
    for first in range(0, len(data), step):
        parent = sha256(parent + data[first : first + step]).digest()
    return perf_counter() - begin


def per_generated_token(num_tokens: int) -> float:
    """Mean over 32 blocks' worth of tokens, one `extend` each."""
    hasher = BlockHasher(BLOCK_SIZE)
    hasher.extend(prompt(num_tokens))
    count = 32 * BLOCK_SIZE
    begin = perf_counter()
    for token in range(count):
        hasher.extend([token])
    return (perf_counter() - begin) / count


def main() -> None:
    run = begin()
    tokens = prompt(PROMPT_TOKENS)
    hashed, floor = [], []
    generated: dict[int, list[float]] = {length: [] for length in LENGTHS}
    for round_number in range(ROUNDS):
        hashed.append(hash_prompt(tokens))
        floor.append(digests_alone(tokens))
        if round_number % 6 == 0:
            for length in LENGTHS:
                generated[length].append(per_generated_token(length))
    per_token = {str(length): 1e6 * median(seconds) for length, seconds in generated.items()}
    run.save(
        {
            "prompt_tokens": PROMPT_TOKENS,
            "block_size": BLOCK_SIZE,
            "prompt_ms": 1e3 * median(hashed),
            "digests_alone_ms": 1e3 * median(floor),
            "ratio": median(hashed) / median(floor),
            "generated_token_us": per_token,
            "generated_token_growth": per_token[str(LENGTHS[-1])] / per_token[str(LENGTHS[0])],
        },
    )


if __name__ == "__main__":
    main()
