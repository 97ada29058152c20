"""The GPU benchmark's own code, tried over the asynchronous fake GPU. Its numbers mean nothing here."""

from __future__ import annotations

import pytest

from tests.gpu.built import run

pytestmark = pytest.mark.process


def test_the_benchmark_runs_on_the_fake():
    done = run("small_benchmark.py")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line.split(" | ") for line in done.stdout.splitlines() if line.startswith("| ")][1:]
    assert done.stdout.startswith(f"copy_gpu the fake GPU {len(rows)} ")
    assert done.stdout.splitlines()[0].endswith("runs")
    assert len(rows) == 3 * 4 * 2
    assert {row[3] for row in rows} == {"H2D", "D2H"}
    assert {row[2] for row in rows} == {"contiguous", "runs", "scattered"}
    assert "64 KB, auto: blocks 5, both_directions_over_one" in done.stdout
    assert "exposed_ms_at_20_ms" in done.stdout
    assert done.stdout.count("left out: ") == 3
