"""The sample trace that the tour's commands use."""

import runpy
from pathlib import Path
from types import SimpleNamespace

from fastdeploy_kvcache_v1.replay.trace import read_trace

ROOT = Path(__file__).parents[2]
sample_trace = SimpleNamespace(**runpy.run_path(str(ROOT / "benchmarks/sample_trace.py")))


def test_the_sample_trace_is_what_its_generator_writes():
    assert sample_trace.PATH.read_text() == sample_trace.text()


def test_conversations_of_the_sample_trace_return():
    requests = list(read_trace(sample_trace.PATH))
    assert len(requests) == sample_trace.REQUESTS
    seen, repeated = set(), 0
    for request in requests:
        repeated += len(seen.intersection(request.hash_ids))
        seen.update(request.hash_ids)
    assert repeated > sum(len(request.hash_ids) for request in requests) / 2


def test_the_commands_of_the_tour_name_the_sample_trace():
    named = str(sample_trace.PATH.relative_to(ROOT))
    lines = (ROOT / "docs" / "tour.md").read_text().splitlines()
    commands = [line.split() for line in lines if line.startswith("    .venv/bin/")]
    assert [words[1] for _, *words in commands if words[0] == "replay"] == [named, named]
