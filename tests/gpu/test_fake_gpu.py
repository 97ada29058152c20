"""The worker on an asynchronous fake GPU: whatever stream runs first, no read is wrong. CUDA itself is not tested here.

`python tests/gpu/fake_gpu.py` says how to run more seeds.
"""

from __future__ import annotations

import ast

import pytest

from tests.gpu.built import run

pytestmark = pytest.mark.process

SEEDS, STEPS = 15, 200
"""Each way to copy has three seeds."""


@pytest.mark.smoke
def test_no_read_is_wrong_over_thousands_of_steps():
    done = run("simulate", 1, SEEDS, STEPS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    seen = ast.parse(done.stdout.rpartition("all: ")[2].strip(), mode="eval").body
    counts = {keyword.arg: ast.literal_eval(keyword.value) for keyword in seen.keywords}
    print(done.stdout)
    assert counts["passes"] > 0.8 * SEEDS * STEPS
    assert counts["copies"] > SEEDS * STEPS
    assert counts["tokens_read"] > 10 * SEEDS * STEPS
    for rare in ("skipped", "drops", "failed", "captures", "quiet"):
        assert counts[rare] > SEEDS, f"{rare} too seldom to prove anything"
