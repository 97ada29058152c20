"""Traces to replay: the real one where it stands beside the checkout, a synthetic one anywhere."""

import json
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
    """400 requests of people who chat: conversations that grow turn by turn, prompts of 348 to 21,028 tokens."""
    return traffic(tmp_path_factory.mktemp("traces") / "synthetic.jsonl", "chat", 400)


def traffic(path: Path, kind: str, count: int) -> Path:
    """A trace of one kind of traffic."""
    lines = islice(KINDS[kind].lines(Source(7), KINDS[kind].shape), count)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
