"""FastDeploy's real ResourceManagerV1 as prefill and as decode over our adapters: random lives, each step checked.

The workers are FAKE ones that keep what every block holds and fail when a request reads anything else.
"""

import re

import pytest

from .fastdeploy_trees import HERE, RELEASES, run_inside

STEPS = 800
BLOCKS_OF_DECODE = 26

pytestmark = [pytest.mark.fastdeploy, pytest.mark.timeout(660)]


@pytest.mark.parametrize("release", [release for release in RELEASES if not release.endswith("-dev")])
def test_random_lives(release, tmp_path):
    output = run_inside(release, tmp_path, HERE / "drive_roles.py", 1, STEPS, BLOCKS_OF_DECODE)
    counts = {name: int(value) for name, value in re.findall(r"([^;]+)=(\d+)", output.partition("RESULT ")[2])}
    counts = {name.strip(): value for name, value in counts.items()}
    assert counts["finished"] > 20
    assert counts["hits"] > 1000, "prefixes at prefill"
    assert min(counts["aborted"], counts["aborted while it ran"], counts["answered 499"], counts["preempted"]) > 1
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
