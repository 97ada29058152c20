"""Traces to replay: the real one where it stands beside the checkout, a synthetic one anywhere."""

import json
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path

import pytest

from fastdeploy_kvcache_v1.lab.replay.trace import TraceRequest
from fastdeploy_kvcache_v1.lab.traffic import KINDS, Source

REAL_TRACE = Path(__file__).parents[4] / "shared/traces/mooncake_conversation.jsonl"


@pytest.fixture
def real_trace() -> Path:
    if not REAL_TRACE.exists():
        pytest.skip(f"no trace at {REAL_TRACE.name} beside the checkout")
    return REAL_TRACE


@pytest.fixture(scope="session")
def synthetic_trace(tmp_path_factory) -> Path:
    """400 requests of people who chat: conversations that grow turn by turn, prompts of 348 to 21,028 tokens."""
    return traffic(tmp_path_factory.mktemp("traces") / "synthetic.jsonl", "chat", 400)


def follow_one_prefix_each(requests: Iterable[TraceRequest]) -> bool:
    """Whether an id always stands behind the same one."""
    pairs = {pair for request in requests for pair in pairwise((None, *request.hash_ids))}
    return len(pairs) == len({after for _, after in pairs})


def traffic(path: Path, kind: str, count: int) -> Path:
    """A trace of one kind of traffic."""
    lines = islice(KINDS[kind].lines(Source(7), KINDS[kind].shape), count)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
