"""FastDeploy's real ResourceManagerV1 over our adapter: thousands of random steps, checked after each.

The worker is a FAKE that keeps what every block holds and fails when a request reads anything else.
"""

import re

import pytest

from fastdeploy_kvcache_v1.fastdeploy_integration.overlay.table import table_for

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
def test_equal_cold_prompts_are_computed_once(release, tmp_path):
    """16 of 506 tokens at once, or of 500 that differ in the last 50; alone: where nobody waits."""
    output = run_inside(release, tmp_path, HERE / "drive_shared_prefills.py")
    results = re.findall(r"RESULT (\w+) budget=(\d+) waiting=(\d+) alone=(\d+)", output)
    costs = {(case, int(budget)): (int(waiting), int(alone)) for case, budget, waiting, alone in results}
    assert len(costs) == 4
    for (case, budget), (waiting, alone) in costs.items():
        assert waiting <= (1.1 * 506 if case == "equal" else 500 + 15 * (50 + 8))
        assert alone > waiting if budget == 128 else alone > 3 * waiting


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_weight_updates_in_every_order_of_events(release, tmp_path, policy):
    output = run_inside(release, tmp_path, HERE / "drive_weight_updates.py", 1, 30, policy)
    result = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", output.partition("RESULT")[2])}
    assert result["updated"] >= 30
    assert result["finished"] > 50
    assert min(result["dropped"], result["swapped_in"], result["aborted"]) > 0


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("role", "seats", "requests"), [("mixed", 1, 2), ("mixed", 6, 9), ("prefill", 1, 1), ("prefill", 6, 6)]
)
def test_a_lost_batch_had_a_request_for_every_seat(release, tmp_path, role, seats, requests):
    output = run_inside(release, tmp_path, HERE / "drive_lost_seats.py", role, seats, requests)
    assert f"RESULT finished={requests} preempted={seats}\n" in output


@pytest.mark.parametrize("release", RELEASES)
def test_only_a_release_that_can_disable_chunks_cuts_no_prompt(release, tmp_path):
    """What latent attention needs, which is refused in other releases."""
    output = run_inside(release, tmp_path, HERE / "drive_whole_prompts.py")
    assert f"RESULT finished=6 cut={not table_for(release).capabilities.disables_chunked_prefill}\n" in output


@pytest.mark.parametrize("release", RELEASES)
def test_a_lost_batch_takes_no_request_whose_id_was_once_aborted(release, tmp_path):
    """2.5 keeps that id: the abortion was on its way when the last token came."""
    output = run_inside(release, tmp_path, HERE / "drive_stale_abortion.py")
    assert "RESULT running=['r'] finished=3\n" in output


@pytest.mark.parametrize("release", RELEASES)
def test_a_request_that_was_passed_over_when_schedule_raised_still_waits(release, tmp_path):
    output = run_inside(release, tmp_path, HERE / "drive_passed_over.py")
    assert "RESULT waits=True finished=4\n" in output
