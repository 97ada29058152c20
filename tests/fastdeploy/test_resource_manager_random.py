"""FastDeploy's real ResourceManagerV1 over our adapter: thousands of random steps, checked after each.

The worker is a FAKE that keeps what every block holds and fails when a request reads anything else.
"""

import re

import pytest

from .fastdeploy_trees import HERE, RELEASES, run_inside

STEPS = 3000

pytestmark = [pytest.mark.process, pytest.mark.timeout(660)]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("host_blocks", "policy", "caching", "seats"),
    [
        (0, "write_through", 1, 6),
        (10, "write_through_selective", 1, 3),
        (80, "write_through", 1, 6),
        (80, "write_back", 1, 6),
        (80, "auto", 1, 6),
        (0, "write_through", 0, 3),
    ],
)
def test_random_lives(release, tmp_path, host_blocks, policy, caching, seats):
    """`schedule` never raises by itself, and every request ends."""
    script = HERE / "drive_resource_manager.py"
    output = run_inside(release, tmp_path, script, 1, STEPS, host_blocks, policy, caching, seats)
    result = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", output.partition("RESULT")[2])}
    assert result["finished"] > 200
    assert min(result["preempted"], result["aborted"], result["resets"]) > 3
    assert min(result["lost"], result["poisoned"], result["doubled"], result["crossed"]) > 3
    if caching:
        assert min(result["waited"], result["kept"]) > 3
        assert result["shared"] > result["waited"] * 8, "blocks that others computed"
    assert (result["swapped_in"] > 0) == (result["swapped_out"] > 0) == (host_blocks > 0)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_weight_updates_in_every_order_of_events(release, tmp_path, policy):
    output = run_inside(release, tmp_path, HERE / "drive_weight_updates.py", 1, 30, policy)
    result = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", output.partition("RESULT")[2])}
    assert result["updated"] >= 30
    assert result["finished"] > 50
    assert min(result["dropped"], result["swapped_in"], result["aborted"]) > 0
