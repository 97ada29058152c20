"""FastDeploy's real ResourceManagerV1 as prefill and as decode over our adapters: random lives, each step checked.

The workers are FAKE ones that keep what every block holds and fail when a request reads anything else.
"""

import re
from collections import Counter

import pytest

from .fastdeploy_trees import HERE, RELEASES, run_inside

STEPS = 500
BLOCKS_OF_DECODE = 26

pytestmark = [pytest.mark.process, pytest.mark.fastdeploy, pytest.mark.timeout(660)]


@pytest.mark.parametrize("release", [release for release in RELEASES if not release.endswith("-dev")])
def test_random_lives(release, tmp_path):
    """Both without a host tier, then with one, then prefill with hardly any room on the device."""
    output = run_inside(release, tmp_path, HERE / "drive_roles.py", 1, STEPS, BLOCKS_OF_DECODE, 0, 80, 30)
    runs = [Counter(counts_of(line)) for line in output.splitlines() if line.startswith("RESULT")]
    for counts in runs:
        assert counts["finished"] > 15
        assert min(counts["prefill hits"], counts["decode hits"]) > 100
        assert counts["found"] > counts["fetched"] / 5, "blocks that decode need not fetch"
        assert min(counts["lost"], counts["computed again"]) > 0
    for side in ("prefill", "decode"):
        assert [counts[f"{side} host hits"] > 100 for counts in runs] == [False, True, True]
        assert [counts[f"{side} swapped in"] > 10 for counts in runs] == [False, True, True]
    assert [counts["failed host copies"] > 0 for counts in runs] == [False, True, True]
    counts = sum(runs, Counter())
    assert min(counts["aborted"], counts["aborted while it ran"], counts["answered 499"], counts["preempted"]) > 1
    assert min(counts["paused prefill"], counts["paused decode"]) > 1
    assert (
        min(
            counts["token before its blocks"],
            counts["sent twice"],
            counts["stray"],
            counts["answered 502"],
            counts["answered 200"],
        )
        > 1
    )


def counts_of(line):
    return {name.strip(): int(value) for name, value in re.findall(r"([^;]+)=(\d+)", line.removeprefix("RESULT "))}
