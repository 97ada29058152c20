"""Traces to replay: the real one where it stands beside the checkout, a synthetic one anywhere."""

import json
import random
from itertools import islice
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.traffic import KINDS, Source

REAL_TRACE = Path(__file__).parents[3] / "shared/traces/mooncake_conversation.jsonl"


@pytest.fixture
def real_trace() -> Path:
    if not REAL_TRACE.exists():
        pytest.skip(f"no trace at {REAL_TRACE.name} beside the checkout")
    return REAL_TRACE


@pytest.fixture(scope="session")
def synthetic_trace(tmp_path_factory) -> Path:
    """400 requests: conversations that grow turn by turn, fresh prompts, lengths from 1 token to 6,000."""
    path = tmp_path_factory.mktemp("traces") / "synthetic.jsonl"
    path.write_text("\n".join(json.dumps(request) for request in conversations(400, seed=7)) + "\n")
    return path


def traffic(path: Path, kind: str, count: int) -> Path:
    """A trace of one kind of traffic."""
    lines = islice(KINDS[kind].lines(Source(7), KINDS[kind].shape), count)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def conversations(count: int, *, seed: int) -> list[dict]:
    rng = random.Random(seed)
    next_id = iter(range(10**6))
    system = [next(next_id), next(next_id)]
    open_ones: list[list[int]] = []
    requests = []
    for number in range(count):
        if open_ones and rng.random() < 0.6:
            prefix = rng.choice(open_ones)
        else:
            prefix = system if rng.random() < 0.7 else []
            open_ones.append(prefix)
        whole = [*prefix, *(next(next_id) for _ in range(rng.randint(0, 4)))]
        open_ones[open_ones.index(prefix) if prefix in open_ones else -1] = whole
        tail = rng.randint(1, 512)
        requests.append(
            {
                "timestamp": number * 10,
                "input_length": 512 * len(whole) + (tail if tail < 512 else 0) or 1,
                "output_length": rng.randint(0, 300),
                "hash_ids": [*whole, *([next(next_id)] if tail < 512 or not whole else [])],
            }
        )
    return requests
